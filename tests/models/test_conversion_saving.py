"""Converted models on disk: the same logits, the same identity, loadable wherever a model is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ttt_adapt.config import ModelSettings
from ttt_adapt.conversion_settings import ConversionSettings
from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.models import generate, load_language_model, wrap_language_model
from ttt_adapt.models.conversion import (
    ConvertedConfig,
    ConvertedForCausalLM,
    convert_model,
    trained_parameters,
)
from ttt_adapt.models.conversion.saving import save_converted
from ttt_adapt.testing import tiny_attention_model, tiny_model, tiny_tokenizer

TOKENS = torch.arange(2, 40).view(2, 19)


def converted(family: str = "llama", **settings: Any) -> ConvertedForCausalLM:
    model = convert_model(tiny_attention_model(family), ConversionSettings(**settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("mode", ["pure", "gated", "distilled"])
@pytest.mark.parametrize(("to", "inner_norm"), [("ttt-linear", True), ("ttt-mlp", False)])
def test_a_round_trip_changes_no_bit(
    tmp_path: Path, family: str, mode: str, to: str, inner_norm: bool
) -> None:
    model = converted(family, mode=mode, to=to, inner_norm=inner_norm, layers="last-2")
    save_converted(model, tiny_tokenizer(), tmp_path)
    assert sorted(path.suffix for path in tmp_path.glob("*.safetensors")) == [".safetensors"]
    loaded = load_language_model(ModelSettings(name=str(tmp_path), device="cpu"))
    assert isinstance(loaded.model, ConvertedForCausalLM)
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.max_length == 128
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.config.settings() == model.config.settings()
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_another_process_loads_it_by_name(tmp_path: Path) -> None:
    model = converted(mode="distilled", layers="1")
    save_converted(model, tiny_tokenizer(), tmp_path)
    script = (
        "import sys, torch\n"
        "from ttt_adapt.config import ModelSettings\n"
        "from ttt_adapt.models import load_language_model\n"
        "lm = load_language_model(ModelSettings(name=sys.argv[1], device='cpu'))\n"
        "ids = torch.arange(2, 40).view(2, 19)\n"
        "print(lm.fingerprint, lm.model(input_ids=ids).logits.double().sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    fingerprint, total = done.stdout.split()
    here = load_language_model(ModelSettings(name=str(tmp_path), device="cpu"))
    assert fingerprint == here.fingerprint
    assert float(total) == pytest.approx(float(logits(model).double().sum()), rel=1e-6)


def test_fingerprints_tell_conversions_apart(tmp_path: Path) -> None:
    found = set()
    kinds: dict[str, dict[str, Any]] = {
        "linear": {"layers": "1"},
        "mini-batch": {"layers": "1", "mini_batch_size": 4},
        "two layers": {"layers": "1,2"},
        "mlp": {"layers": "1", "to": "ttt-mlp"},
    }
    for name, settings in kinds.items():
        save_converted(converted(**settings), tiny_tokenizer(), tmp_path / name)
        settings_of = ModelSettings(name=str(tmp_path / name), device="cpu")
        found.add(load_language_model(settings_of).fingerprint)
        found.add(
            wrap_language_model(converted(**settings), tiny_tokenizer(), name="x").fingerprint
        )
    assert len(found) == 8


def test_text_is_continued(tmp_path: Path) -> None:
    save_converted(converted("gpt2"), tiny_tokenizer(), tmp_path)
    lm = load_language_model(ModelSettings(name=str(tmp_path), device="cpu"))
    text = generate(lm, "alpha beta", max_new_tokens=6, temperature=0.0, seed=0)
    ids = [0, *lm.tokenizer("alpha beta", add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(lm.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert text == lm.tokenizer.decode(ids[-6:], skip_special_tokens=True)


def test_config_json_names_the_conversion(tmp_path: Path) -> None:
    save_converted(converted(layers="every-2"), tiny_tokenizer(), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "ttt_adapt_converted"
    assert written["text_config"]["model_type"] == "llama"
    chosen = written["conversion"]
    assert [chosen["layers"], chosen["mode"], chosen["to"]] == ["1", "pure", "ttt-linear"]
    assert [chosen["mini_batch_size"], chosen["learning_rate"]] == [1, 0.2]
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, ConvertedConfig)
    assert config.get_text_config().max_position_embeddings == 128


def test_a_conversion_of_another_version(tmp_path: Path) -> None:
    save_converted(converted(), tiny_tokenizer(), tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    written["conversion"]["warmth"] = 3
    path.write_text(json.dumps(written))
    with pytest.raises(SettingsError, match=r"config\.conversion: unknown setting warmth"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="unknown setting warmth"):
        load_language_model(ModelSettings(name=str(tmp_path), device="cpu"))


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_converted(converted(mode="distilled"), tiny_tokenizer(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["base.model.layers.1.self_attn.inner.lr_weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights .*inner\.lr_weight"):
        load_language_model(ModelSettings(name=str(tmp_path), device="cpu"))


def test_another_model_is_not_written_over(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ModelError, match="holds another model; name another folder"):
        save_converted(converted(), tiny_tokenizer(), tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    with pytest.raises(ModelError, match="expected a folder for the model, found a file"):
        save_converted(converted(), tiny_tokenizer(), tmp_path / "config.json")
