"""TTT models as models of transformers: saved and loaded, in half precision, learning, refusing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from ttt_adapt.config import ModelSettings
from ttt_adapt.errors import ModelError, OperatorInputError
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import (
    TTTConfig,
    TTTForCausalLM,
    generate,
    load_language_model,
    wrap_language_model,
)
from ttt_adapt.models.language_model import position_limit
from ttt_adapt.testing import sample_text, tiny_tokenizer, tiny_ttt_model

MAMBA = {"use_gate": True, "share_qk": True, "pre_conv": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"layer_types": "ttt_linear"},
    "mamba-mlp": {"layer_types": "ttt_mlp", **MAMBA},
    "attention": {"layer_types": "attention"},
    "hybrid": {"layer_types": ["attention", "ttt_mlp"], "tie_word_embeddings": False},
}


@pytest.fixture(params=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_ttt_model(**VARIANTS[request.param])


def some_tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (batch, length), generator=generator)


@torch.no_grad()
def test_round_trip_gives_the_same_logits(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokens = some_tokens(2, 11)
    expected = model(input_ids=tokens).logits
    classes: tuple[Any, ...] = (TTTForCausalLM, transformers.AutoModelForCausalLM)
    for auto in classes:
        again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(again.eval()(input_ids=tokens).logits, expected)
        assert again.config.layer_types == model.config.layer_types
        tied = again.lm_head.weight is again.get_input_embeddings().weight
        assert tied == model.config.tie_word_embeddings
    body: Any = transformers.AutoModel.from_pretrained(tmp_path)
    hidden = body.eval()(input_ids=tokens).last_hidden_state
    assert torch.equal(functional.linear(hidden, model.lm_head.weight), expected)


def test_nothing_is_kept_in_buffers(model: Any) -> None:
    assert not list(model.buffers())


def test_initial_weights_are_the_paper_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TTTForCausalLM(TTTConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1))
    mixer = model.model.layers[0].mixer
    for matrix in (mixer.q_proj.weight, mixer.initial_weight, mixer.lr_weight):
        assert abs(float(matrix.detach().std()) - 0.02) < 0.002
    for zero in (mixer.initial_bias, mixer.lr_bias, mixer.token_scale_offset, mixer.norm_bias):
        assert not bool(zero.any())
    assert bool((mixer.norm_weight == 1).all())


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(model: Any, tmp_path: Path, dtype: Any) -> None:
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    lm = load_language_model(ModelSettings(name=str(tmp_path), device="cpu", dtype=dtype))
    assert lm.model.dtype == getattr(torch, dtype)
    tokens = some_tokens(2, 11)
    output = lm.model(input_ids=tokens, use_cache=True)
    expected = model(input_ids=tokens).logits
    error = (output.logits.float() - expected).abs().max() / expected.abs().max()
    assert error < (0.1 if dtype == "bfloat16" else 0.02)
    # States stay precise.
    states = output.past_key_values.tensors().items()
    assert all(t.dtype == torch.float32 for name, t in states if ".weights." in name)
    later = lm.model(input_ids=tokens[:, :3], past_key_values=output.past_key_values)
    assert bool(later.logits.isfinite().all())


@torch.no_grad()
def test_loads_scores_and_generates_as_any_language_model(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    lm = load_language_model(ModelSettings(name=str(tmp_path), device="cpu"))
    assert lm.max_length == 128 == position_limit(model.config)
    texts = [sample_text(0, 40), "short"]
    together = bits_per_byte(lm.model, lm.tokenizer, texts, max_length=lm.max_length).per_text
    for text, score in zip(texts, together, strict=True):
        (alone,) = bits_per_byte(lm.model, lm.tokenizer, [text]).per_text
        assert score.nats == pytest.approx(alone.nats, rel=1e-5)
    found = generate(lm, "alpha", max_new_tokens=8, temperature=0.0, seed=0)
    ids = [0, *lm.tokenizer("alpha")["input_ids"]]
    for _ in range(8):
        token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token == 0:
            break
        ids.append(token)
    assert found == lm.tokenizer.decode(ids[6:], skip_special_tokens=True)


def test_a_fresh_process_loads_it(tmp_path: Path) -> None:
    tiny_ttt_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    code = (
        "from ttt_adapt.config import ModelSettings\n"
        "from ttt_adapt.models import load_language_model\n"
        f"lm = load_language_model(ModelSettings(name={str(tmp_path)!r}, device='cpu'))\n"
        "print(type(lm.model).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "TTTForCausalLM"


def test_importing_the_models_room_leaves_transformers_alone() -> None:
    code = "import sys, ttt_adapt.models; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_loss_gradients_and_checkpointing(model: Any) -> None:
    tokens = some_tokens(2, 11)
    labels = tokens.masked_fill(torch.arange(11) < 3, -100)
    gradients = []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        output = model(input_ids=tokens, labels=labels)
        expected = functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        torch.testing.assert_close(output.loss, expected)
        model.zero_grad()
        output.loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert bool(gradient.any()), f"{name} does not learn"
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_gradients_flow_through_the_cache() -> None:
    model, tokens = tiny_ttt_model(**MAMBA), some_tokens(1, 10)
    whole = model(input_ids=tokens, use_cache=False).logits[:, 6:].square().sum()
    names, weights = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(whole, weights)
    cache = model(input_ids=tokens[:, :6], use_cache=True).past_key_values
    rest = model(input_ids=tokens[:, 6:], past_key_values=cache).logits.square().sum()
    found = torch.autograd.grad(rest, weights)
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)


@torch.no_grad()
def test_embeddings_in_place_of_tokens_and_the_last_logits(model: Any) -> None:
    tokens = some_tokens(2, 7)
    whole = model(input_ids=tokens, output_hidden_states=True)
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    assert torch.equal(embedded, whole.logits)
    assert torch.equal(model(input_ids=tokens, logits_to_keep=2).logits, whole.logits[:, -2:])
    assert len(whole.hidden_states) == 3
    assert torch.equal(model.lm_head(whole.hidden_states[-1]), whole.logits)
    assert torch.equal(model(input_ids=tokens, return_dict=False)[0], whole.logits)


@torch.no_grad()
def test_attention_implementations_agree() -> None:
    tokens = some_tokens(2, 7)
    mask = torch.ones(2, 7)
    mask[0, :3] = 0
    model = tiny_ttt_model(layer_types="attention")
    first = model(input_ids=tokens, attention_mask=mask, use_cache=True)
    later = model(input_ids=tokens, past_key_values=first.past_key_values).logits
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    again = model(input_ids=tokens, attention_mask=mask, use_cache=True)
    real = mask.bool()
    torch.testing.assert_close(again.logits[real], first.logits[real])
    torch.testing.assert_close(
        model(input_ids=tokens, past_key_values=again.past_key_values).logits, later
    )


@torch.no_grad()
def test_base_lr_can_be_set() -> None:
    model, tokens = tiny_ttt_model(layer_types="ttt_mlp"), some_tokens(1, 9)
    expected = model(input_ids=tokens).logits
    model.set_base_lr(0.01)
    lower = model(input_ids=tokens).logits
    other = tiny_ttt_model(layer_types="ttt_mlp", base_lr=0.01)
    assert torch.equal(lower, other(input_ids=tokens).logits)
    assert not torch.allclose(lower, expected)
    model.set_base_lr(None)
    assert torch.equal(model(input_ids=tokens).logits, expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"layer_types": "mamba"},
            "expected layer_types of ttt_linear, ttt_mlp, attention, linear_attention, found",
        ),
        ({"layer_types": ["ttt_mlp"]}, "a layer type for each of 12 layers, found 1"),
        ({"hidden_size": 100}, r"a multiple of 2 · num_attention_heads \(24\), found 100"),
        ({"mini_batch_size": 0}, "expected mini_batch_size of at least 1, found 0"),
    ],
)
def test_shapes_that_do_not_fit(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected), torch.device("meta"):
        TTTForCausalLM(TTTConfig(**options))


def test_inputs_that_do_not_fit() -> None:
    model, tokens = tiny_ttt_model(), some_tokens(2, 6)
    with pytest.raises(ModelError, match="expected either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ModelError, match=r"attention_mask \[2, 6\] or with the columns before, fo"):
        model(input_ids=tokens, attention_mask=torch.ones(2, 5))
    with pytest.raises(ModelError, match="expected arguments that TTTForCausalLM knows, found pos"):
        model(input_ids=tokens, position_ids=tokens)
    with pytest.raises(OperatorInputError, match="at least one row, token, head and dimension"):
        model(input_ids=tokens[:, :0])


def test_wrapped_models_have_a_fingerprint() -> None:
    first, again, other = (
        wrap_language_model(tiny_ttt_model(seed), tiny_tokenizer(), name="tiny")
        for seed in (0, 0, 1)
    )
    assert first.fingerprint == again.fingerprint != other.fingerprint
