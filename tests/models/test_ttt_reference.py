"""Weights of the public PyTorch reference give its logits.

`reference_linear.safetensors` and `reference_mlp.safetensors` hold models, tokens and logits of the
reference itself (github.com/test-time-training/ttt-lm-pytorch, commit cd831db, file ttt.py, with
transformers 5.23 and its `_tied_weights_keys` made a dict), written by

    torch.manual_seed(0)
    model = TTTForCausalLM(TTTConfig(
        vocab_size=19, hidden_size=16, intermediate_size=12, num_attention_heads=2,
        mini_batch_size=4, pad_token_id=None,
        # linear: the Transformer backbone; mlp: the Mamba backbone
        ttt_layer_type="linear", ttt_base_lr=1.0, num_hidden_layers=2,
        ttt_layer_type="mlp", ttt_base_lr=0.1, num_hidden_layers=1,
        use_gate=True, share_qk=True, pre_conv=True,
    )).eval()
    for p in model.parameters(): p.add_(0.2 * torch.randn_like(p))
    ids = torch.randint(0, 19, (2, 11))
    save_file({"weights." + k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
              | {"input_ids": ids, "logits": model(input_ids=ids).logits}, path)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.errors import ModelError
from ttt_adapt.models import TTTConfig, TTTForCausalLM, load_reference_state_dict
from ttt_adapt.testing import tiny_ttt_model

MAMBA = {"use_gate": True, "share_qk": True, "pre_conv": True}


def recorded(kind: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """An empty model of the recorded one's shape, its weights, tokens and logits."""
    held = load_file(Path(__file__).with_name(f"reference_{kind}.safetensors"))
    tokens, logits = held.pop("input_ids"), held.pop("logits")
    options: dict[str, Any] = {"num_hidden_layers": 2} if kind == "linear" else {
        "num_hidden_layers": 1, **MAMBA,
    }  # fmt: skip
    config = TTTConfig(
        vocab_size=19, hidden_size=16, intermediate_size=12, num_attention_heads=2,
        mini_batch_size=4, layer_types=f"ttt_{kind}", **options,
    )  # fmt: skip
    weights = {name.removeprefix("weights."): tensor for name, tensor in held.items()}
    model: Any = TTTForCausalLM(config)
    return model.eval(), weights, tokens, logits


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_logits_are_the_reference_s(kind: str, backend: str) -> None:
    model, weights, tokens, logits = recorded(kind)
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    for block in model.model.layers:
        block.mixer.backend = backend
    load_reference_state_dict(model, weights)
    found = model(input_ids=tokens).logits
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in weights.items())
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    load_reference_state_dict(model.double(), tied)
    torch.testing.assert_close(model(input_ids=tokens).logits.float(), logits, rtol=1e-5, atol=1e-5)


def names_and_shapes(kind: str, mamba: bool) -> dict[str, tuple[int, ...]]:
    """What the reference calls its parameters: V 258, C 32, D 16, H 2, b 4, one layer."""
    block = "model.layers.0."
    mixer = f"{block}seq_modeling_block."
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (258, 32),
        "model.norm.weight": (32,),
        f"{block}seq_norm.weight": (32,),
        f"{block}ffn_norm.weight": (32,),
        f"{block}mlp.gate_proj.weight": (48, 32),
        f"{block}mlp.up_proj.weight": (48, 32),
        f"{block}mlp.down_proj.weight": (32, 48),
        **{f"{mixer}{name}_proj.weight": (32, 32) for name in ("qvog" if mamba else "qkvo")},
        f"{mixer}learnable_ttt_lr_weight": (2, 1, 32),
        f"{mixer}learnable_ttt_lr_bias": (2, 1),
        f"{mixer}learnable_token_idx": (4,),
        f"{mixer}ttt_norm_weight": (2, 16),
        f"{mixer}ttt_norm_bias": (2, 16),
        f"{mixer}post_norm.weight": (32,),
        f"{mixer}post_norm.bias": (32,),
    }
    if kind == "linear":
        found |= {f"{mixer}W1": (2, 16, 16), f"{mixer}b1": (2, 1, 16)}
    else:
        found |= {f"{mixer}W1": (2, 16, 64), f"{mixer}b1": (2, 1, 64)}
        found |= {f"{mixer}W2": (2, 64, 16), f"{mixer}b2": (2, 1, 16)}
    if mamba:
        found[f"{block}conv.norm.weight"] = (32,)
        for name in (f"{block}conv.conv", f"{mixer}conv_q", f"{mixer}conv_k"):
            found |= {f"{name}.weight": (32, 1, 4), f"{name}.bias": (32,)}
    return found


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("mamba", [False, True])
def test_every_weight_of_the_reference_has_its_place(kind: str, mamba: bool) -> None:
    options: dict[str, Any] = {"layer_types": f"ttt_{kind}", **(MAMBA if mamba else {})}
    model = tiny_ttt_model(num_hidden_layers=1, **options)
    shapes = names_and_shapes(kind, mamba)
    weights = {
        name: torch.full(shape, float(value)) for value, (name, shape) in enumerate(shapes.items())
    }
    load_reference_state_dict(model, weights)
    own = [float(parameter.detach().flatten()[0]) for parameter in model.parameters()]
    assert sorted(own) == [float(value) for value in range(len(shapes))]
    mixer = model.model.layers[0].mixer
    place = list(shapes).index("model.layers.0.seq_modeling_block.W1")
    assert float(next(iter(mixer.initial_weights().values())).detach().max()) == place


def test_weights_that_do_not_fit() -> None:
    model, weights, _, _ = recorded("linear")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del weights["model.norm.weight"]
    weights["model.extra"] = torch.ones(1)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = torch.ones(2, 2)
    with pytest.raises(ModelError, match="3 differ") as caught:
        load_reference_state_dict(model, weights)
    assert "model.extra is unknown" in str(caught.value)
    assert "model.norm.weight is missing" in str(caught.value)
    assert f"{name} is [2, 2], not [12, 16]" in str(caught.value)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    with pytest.raises(ModelError, match="ttt_mlp layers throughout, found attention"):
        load_reference_state_dict(tiny_ttt_model(layer_types="attention"), weights)
    untied = tiny_ttt_model(tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_reference_state_dict(untied, {"lm_head.bias": torch.ones(1)})
