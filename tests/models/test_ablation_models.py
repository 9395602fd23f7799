"""Models of every rung: saved, loaded, continued, generated from, refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ttt_adapt.errors import FingerprintMismatchError, ModelError
from ttt_adapt.models import TTTConfig, TTTForCausalLM
from ttt_adapt.models.ttt import TTTCache

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 1, "eos_token_id": None,
    "bos_token_id": 0,
}  # fmt: skip
PLAIN = {"inner_norm": False, "learnable_lr": False, "mini_batch_size": 64}
RUNGS: dict[str, dict[str, Any]] = {
    "linear attention": {"layer_types": "linear_attention", "feature_map": "elu"},
    "improved": {"layer_types": "linear_attention"},
    "equivalence": {**PLAIN, "learnable_w0": False},
    "learnable w0": PLAIN,
    "norm": {"learnable_lr": False, "mini_batch_size": 64},
    "mini-batch": {"learnable_lr": False},
    "mixed": {"layer_types": ["linear_attention", "ttt_mlp"], "learnable_lr": False},
}


def make(rung: str) -> Any:
    torch.manual_seed(0)
    model: Any = TTTForCausalLM(TTTConfig(**SHAPE, **RUNGS[rung]))
    return model.eval()


def some_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 50, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rung", RUNGS)
def test_rungs_save_load_and_generate(rung: str, tmp_path: Path) -> None:
    model, ids = make(rung), some_ids(2, 21)
    model.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model(input_ids=ids).logits
    assert torch.equal(again(input_ids=ids).logits, expected)
    # A part, the cache written and read again, the rest.
    cache = model(input_ids=ids[:, :9], use_cache=True).past_key_values
    cache.save(tmp_path / "cache.safetensors", fingerprint="f")
    read = TTTCache.load(tmp_path / "cache.safetensors", config=model.config, fingerprint="f")
    rest = model(input_ids=ids[:, 9:], past_key_values=read).logits
    torch.testing.assert_close(rest, expected[:, 9:], rtol=1e-4, atol=1e-5)
    # Left padding and beams.
    padded = torch.cat([torch.ones(2, 3, dtype=torch.long), ids[:, :8]], 1)
    mask = (torch.arange(11) >= 3).long().expand(2, -1)
    options = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    found = model.generate(input_ids=padded, attention_mask=mask, **options)
    alone = model.generate(
        input_ids=ids[:, :8], attention_mask=torch.ones(2, 8, dtype=torch.long), **options
    )
    assert torch.equal(found[:, 11:], alone[:, 8:])


def test_linear_attention_and_its_ttt_form_are_one_model() -> None:
    attention, ttt, ids = make("improved"), make("equivalence"), some_ids(2, 40)
    ttt.load_state_dict(attention.state_dict())
    one, other = attention.double()(input_ids=ids).logits, ttt.double()(input_ids=ids).logits
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_caches_from_before_these_settings_fit() -> None:
    config = TTTConfig(**SHAPE)
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "layer_types",
            "mini_batch_size", "base_lr", "rope_theta", "use_gate", "share_qk", "pre_conv",
            "conv_kernel")  # fmt: skip
    values = {key: getattr(config, key) for key in keys}
    old = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    assert config.cache_key() == old
    fixed, ids = make("mini-batch"), some_ids(1, 5)
    cache = fixed(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(FingerprintMismatchError, match="a model of another shape"):
        TTTForCausalLM(config)(input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner_norm": False, "layer_types": "ttt_mlp"}, "inner_norm with ttt_mlp layers"),
        ({"learnable_w0": False}, "learnable_w0 with inner_norm.*add inner_norm=False"),
        ({"feature_map": "relu"}, "feature_map of identity, elu, found 'relu'"),
        ({"layer_types": "linear"}, "ttt_linear, ttt_mlp, attention, linear_attention"),
    ],
)
def test_configurations_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TTTConfig(**{**SHAPE, **options})
