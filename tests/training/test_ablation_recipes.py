"""The ladder's recipes, a TTT model of the bundled one's size, and what both ask of pretraining."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.config import (
    ModelSettings,
    PretrainSettings,
    SourceSettings,
    load_settings,
    make_settings,
)
from ttt_adapt.configs import config_names, config_path
from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.models import bundled_models, load_language_model
from ttt_adapt.models.checkpoints import BUNDLED
from ttt_adapt.testing import sample_text, silent
from ttt_adapt.training import plan_pretraining, pretrain
from ttt_adapt.training.building import build_model, obtain_tokenizer

LADDER = sorted(
    name for name in config_names() if name.startswith("ablation_") and name[9].isdigit()
)
CONTEXT = sorted(name for name in config_names() if name.startswith("ablation_context_"))


def recipe(name: str) -> PretrainSettings:
    return load_settings(PretrainSettings, config_path(name))


def num_parameters(settings: PretrainSettings) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(settings, 0).parameters())


def tiny(folder: Path, **changes: Any) -> PretrainSettings:
    path = folder / "corpus.txt"
    if not path.is_file():
        path.write_text(
            "\n---\n".join(sample_text(seed, 80) for seed in range(40)), encoding="utf-8"
        )
    source = SourceSettings(path="corpus.txt", separator="---")
    values: dict[str, Any] = {
        "name": "tiny", "sources": (source,), "architecture": "ttt-linear", "vocab_size": 300,
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2,
        "max_length": 32, "num_tokens": 32 * 8 * 12, "batch_size": 8, "micro_batch_size": 8,
        "learning_rate": 1e-2, "precision": "float32",
        **changes,
    }  # fmt: skip
    return PretrainSettings(**values)


def test_each_rung_changes_what_its_row_says() -> None:
    steps = []
    for before, after in itertools.pairwise(LADDER):
        one, other = recipe(before).model_dump(), recipe(after).model_dump()
        changed = {key for key in one if one[key] != other[key]} - {"name"}
        steps.append(changed)
    assert steps == [
        {"feature_map"},
        # Theorem 1: the same layer, said otherwise.
        {
            "architecture",
            "inner_norm",
            "learnable_w0",
            "learnable_lr",
            "base_lr",
            "mini_batch_size",
        },
        {"learnable_w0"},
        {"inner_norm"},
        {"mini_batch_size"},
        {"learnable_lr"},
        {"backbone"},
    ]
    last = recipe(LADDER[-1])
    assert (last.architecture, last.mini_batch_size, last.base_lr) == ("ttt-linear", 16, 1.0)
    assert {recipe(name).mini_batch_size for name in LADDER[2:5]} == {last.max_length}


def test_models_that_are_compared_are_of_one_size() -> None:
    sizes = [num_parameters(recipe(name)) for name in LADDER]
    assert min(sizes) > 1e6 and max(sizes) < min(2e6, 1.03 * min(sizes))
    sizes = [num_parameters(recipe(name)) for name in CONTEXT]
    assert max(sizes) < 1.01 * min(sizes)
    same = ("num_layers", "hidden_size", "num_heads", "max_length", "num_tokens", "sources", "seed",
            "batch_size", "learning_rate", "optimizer", "tokenizer")  # fmt: skip
    values = [[getattr(recipe(name), key) for key in same] for name in CONTEXT]
    assert len(CONTEXT) == 3 and values[0] == values[1] == values[2]


def test_the_bundled_ttt_model_is_llama_s_like() -> None:
    llama = recipe("pretrain_llama_7m")
    start, ours = recipe("pretrain_ttt_linear_7m_start"), recipe("pretrain_ttt_linear_7m")
    assert (start.initial_model, start.initial_parts) == ("llama-7m", "all-but-mixers")
    assert (ours.name, Path(str(ours.initial_model)).name) == ("ttt-linear-7m", start.name)
    assert start.sources == llama.sources
    assert start.validation == ours.validation == llama.validation
    # What goes on has the shape of what it goes on from, and reads passages of llama's sources.
    shape = ("architecture", "backbone", "mini_batch_size", "base_lr", "vocab_size", "hidden_size",
             "intermediate_size", "num_layers", "num_heads")  # fmt: skip
    assert [getattr(start, key) for key in shape] == [getattr(ours, key) for key in shape]
    related = [source for source in ours.sources if source.related]
    assert [(source.path, source.fraction) for source in related] == [
        ("minipile/train-0[0-4].jsonl.zst", llama.sources[-1].fraction)
    ]
    assert start.vocab_size == llama.vocab_size
    size = num_parameters(ours)
    assert abs(size / num_parameters(llama) - 1) < 0.03 and 2 * size < 25e6
    assert "A small" not in ours.data_description


def test_bundled_folders_are_names() -> None:
    folders = [path.parent.name for path in sorted(BUNDLED.glob("*/config.json"))]
    assert bundled_models() == folders and "llama-7m" in folders


@pytest.mark.parametrize("name", LADDER)
def test_every_rung_learns_and_loads(name: str, tmp_path: Path) -> None:
    row = recipe(name)
    kept = ("architecture", "feature_map", "backbone", "inner_norm", "learnable_w0", "learnable_lr",
            "base_lr")  # fmt: skip
    settings = tiny(
        tmp_path,
        **{key: getattr(row, key) for key in kept},
        mini_batch_size=32 if row.mini_batch_size == row.max_length else 8,
    )
    result = pretrain(settings, tmp_path / "m", data_root=tmp_path, report=silent)
    rows = (tmp_path / "m" / "loss.csv").read_text().splitlines()
    first, last = (float(rows[i].split(",")[1]) for i in (1, -1))
    assert first == pytest.approx(math.log(300), abs=0.1) and last < first - 0.5
    assert result.finished
    lm = load_language_model(ModelSettings(name=str(tmp_path / "m"), device="cpu"))
    config = lm.model.config
    assert (config.inner_norm, config.learnable_w0) == (row.inner_norm, row.learnable_w0)
    card = (tmp_path / "m" / "README.md").read_text()
    assert f"| architecture | {row.architecture}" in card
    assert ("not learned" in card) == (not row.learnable_lr)
    assert ("W0 = 0" in card) == (not row.learnable_w0)


def test_another_model_s_tokenizer(tmp_path: Path) -> None:
    settings = tiny(tmp_path, tokenizer="llama-7m", vocab_size=8192)
    (tmp_path / "m").mkdir()
    found = obtain_tokenizer(settings, tmp_path / "m", tmp_path, silent)
    assert found.get_vocab_size() == 8192
    text = "a café at night, 1984"
    assert found.decode(found.encode(text).ids) == text
    # From then on it is the run's own.
    other = tiny(tmp_path, tokenizer="no such model")
    assert obtain_tokenizer(other, tmp_path / "m", tmp_path, silent).get_vocab_size() == 8192
    with pytest.raises(ModelError, match=r"no such model: expected a bundled model \(.*llama-7m"):
        obtain_tokenizer(other, tmp_path, tmp_path, silent)
    with pytest.raises(ModelError, match=r"at most vocab_size \(300\).*set vocab_size = 8192"):
        obtain_tokenizer(tiny(tmp_path, tokenizer="llama-7m"), tmp_path, tmp_path, silent)


@pytest.mark.parametrize("first", ["llama", "transformer", "ttt-mlp"])
def test_begins_with_another_architecture_s_parts(tmp_path: Path, first: str) -> None:
    start = tiny(tmp_path, architecture=first, num_tokens=32 * 8 * 2)
    pretrain(start, tmp_path / "first", data_root=tmp_path, report=silent)
    changes: dict[str, Any] = {
        "backbone": "mamba", "initial_model": str(tmp_path / "first"), "learning_rate": 1e-12,
        "num_tokens": 32 * 8, "optimizer": "adamw",
    }  # fmt: skip
    settings = tiny(tmp_path, **changes, initial_parts="all-but-mixers")
    pretrain(settings, tmp_path / "m", data_root=tmp_path, report=silent)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "first"))
    names = ("input_layernorm", "post_attention_layernorm") if first == "llama" else (
        "mixer_norm", "mlp_norm")  # fmt: skip
    pairs = {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.norm.weight": "model.norm.weight",
        "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mixer_norm.weight": f"model.layers.0.{names[0]}.weight",
        "model.layers.0.mlp_norm.weight": f"model.layers.0.{names[1]}.weight",
    }
    for one, other in pairs.items():
        assert torch.equal(ours[one], theirs[other])
    fresh = build_model(settings, settings.seed).state_dict()
    mixer = "model.layers.0.mixer.q_proj.weight"
    assert torch.equal(ours[mixer], fresh[mixer].half())
    assert not ours["model.layers.0.pre_conv.conv.weight"].any()
    assert not ours["model.layers.0.pre_conv.conv.bias"].any()
    card = (tmp_path / "m" / "README.md").read_text()
    assert "from the embeddings, norms and feed-forward layers of" in card
    assert "from scratch" not in card
    with pytest.raises(ModelError, match="weights differ"):
        pretrain(tiny(tmp_path, **changes), tmp_path / "n", data_root=tmp_path, report=silent)
    if first == "llama":
        wide = tiny(tmp_path, **changes, initial_parts="all-but-mixers", intermediate_size=64)
        with pytest.raises(ModelError, match=r"differ \(model\.layers\.0\.mlp\.down_proj"):
            pretrain(wide, tmp_path / "w", data_root=tmp_path, report=silent)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architecture": "ttt-mlp", "inner_norm": False}, "are of ttt-linear; found ttt-mlp"),
        ({"architecture": "ttt-linear", "learnable_w0": False}, "needs inner_norm = false"),
        ({"learnable_lr": False}, "of ttt-linear and ttt-mlp; found llama"),
        ({"feature_map": "elu"}, "of linear-attention; found llama"),
        ({"architecture": "linear-attention", "backbone": "mamba"}, "found architecture linear"),
        ({"tokenizer": "a", "initial_model": "b"}, "brings its own tokenizer"),
        ({"initial_parts": "all-but-mixers"}, "needs an initial_model"),
    ],
)
def test_settings_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_settings(PretrainSettings, {"name": "x", "sources": [], **values})


def test_plans_of_the_recipes() -> None:
    for name in (*LADDER, *CONTEXT):
        settings = recipe(name)
        settings = settings.model_copy(update={"sources": (), "validation": ()})
        plan = plan_pretraining(settings)
        assert plan["tokens_per_step"] == 4096 and plan["num_steps"] == 732
