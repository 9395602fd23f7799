"""Pretraining models of TTT layers: learned, killed and continued, documented, loaded."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.config import (
    ModelSettings,
    PretrainSettings,
    load_settings,
    make_settings,
)
from ttt_adapt.configs import config_path
from ttt_adapt.errors import AdaptationError, SettingsError
from ttt_adapt.models import load_language_model
from ttt_adapt.storage import sha256_file, stable_hash
from ttt_adapt.testing import silent, tiny_pretraining, write_training_corpus
from ttt_adapt.training import plan_pretraining, pretrain
from ttt_adapt.training.building import build_model, build_optimizers, inner_base_lr
from ttt_adapt.training.mixture import Mixture
from ttt_adapt.training.pretraining import run_key
from ttt_adapt.training.schedule import learning_rate_factor

TTT = ["ttt-linear", "ttt-mlp"]


def tiny_settings(**changes: Any) -> PretrainSettings:
    """Eight steps of rows whose length is no multiple of the inner mini-batch."""
    sizes = {"mini_batch_size": 8, "max_length": 36, "num_tokens": 36 * 4 * 8}
    return tiny_pretraining(**{"architecture": "ttt-linear", **sizes, **changes})


@pytest.mark.parametrize(
    ("architecture", "backbone", "optimizer"),
    [
        ("ttt-linear", "transformer", "muon"),
        ("ttt-linear", "mamba", "adamw"),
        ("ttt-mlp", "mamba", "muon"),
        ("transformer", "transformer", "muon"),
    ],
)
def test_loss_falls_and_model_loads(
    tmp_path: Path, architecture: str, backbone: str, optimizer: str
) -> None:
    write_training_corpus(tmp_path)
    out = tmp_path / "model"
    settings = tiny_settings(
        architecture=architecture, backbone=backbone, optimizer=optimizer,
        num_layers=1, num_tokens=36 * 4 * 30, learning_rate=1e-2, precision="bfloat16",
    )  # fmt: skip
    result = pretrain(settings, out, data_root=tmp_path, report=silent)
    rows = (out / "loss.csv").read_text().splitlines()
    first, last = (float(rows[i].split(",")[1]) for i in (1, -1))
    assert last < first - 1.0 and result.validation_loss_nats < first - 0.8
    lm = load_language_model(ModelSettings(name=str(out), device="cpu"))
    assert type(lm.model).__name__ == "TTTForCausalLM" and lm.max_length == 36
    assert lm.model.config.use_cache
    card = (out / "README.md").read_text()
    assert f"| architecture | {architecture}" in card
    if architecture in TTT:
        assert f"{backbone} backbone, mini-batches of 8 tokens" in card
    tensors = load_file(out / "model.safetensors")
    size = sum(tensor.numel() for tensor in tensors.values())
    assert plan_pretraining(settings, tmp_path)["num_parameters"] == size


KILLED = """
import sys
from pathlib import Path
from ttt_adapt.config import PretrainSettings
from ttt_adapt.testing import silent
from ttt_adapt.training import pretrain
folder = Path(sys.argv[1])
settings = PretrainSettings.model_validate_json(sys.argv[2])
pretrain(settings, folder / "killed", data_root=folder, report=silent)
"""


@pytest.mark.parametrize("architecture", TTT)
def test_killed_run_continues_to_the_same_bytes(tmp_path: Path, architecture: str) -> None:
    write_training_corpus(tmp_path)
    changes: dict[str, Any] = {
        "architecture": architecture, "backbone": "mamba", "num_layers": 1, "checkpoint_every": 1,
        "schedule": "cosine", "final_learning_rate": 1e-5, "base_lr_start": 0.01,
        "base_lr_warmup_fraction": 0.7,
    }  # fmt: skip
    settings = tiny_settings(**changes)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), settings.model_dump_json()],
        stdout=subprocess.DEVNULL,
    )
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 100
    while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for stop in (5, None):
        pretrain(settings, tmp_path / "killed", data_root=tmp_path, stop_after=stop, report=silent)
    pretrain(settings, tmp_path / "whole", data_root=tmp_path, report=silent)
    name = "model.safetensors"
    assert sha256_file(tmp_path / "whole" / name) == sha256_file(tmp_path / "killed" / name)


def test_diverging_run_says_so(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    settings = tiny_settings(optimizer="adamw", learning_rate=1e30)
    with pytest.raises((AdaptationError, RuntimeError), match="became nan|non-finite"):
        pretrain(settings, tmp_path / "m", data_root=tmp_path, report=silent)


@pytest.mark.parametrize("architecture", [*TTT, "transformer", "llama"])
def test_muon_takes_linear_layers_only(architecture: str) -> None:
    backbone = "mamba" if architecture in TTT else "transformer"
    settings = tiny_settings(architecture=architecture, backbone=backbone)
    model = build_model(settings, 0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = (
        {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in build_optimizers(settings, model)
    )
    assert not muon & adamw and muon | adamw == set(names.values())
    assert all(name.endswith("_proj.weight") for name in muon)
    assert not any(name.endswith("_proj.weight") for name in adamw)


def test_what_the_settings_say_is_built() -> None:
    for architecture, layer_type in (("ttt-linear", "ttt_linear"), ("transformer", "attention")):
        config = build_model(tiny_settings(architecture=architecture), 0).config
        assert config.layer_types == [layer_type] * 2 and config.max_position_embeddings == 36
    mamba = build_model(tiny_settings(backbone="mamba", base_lr=0.3), 0)
    assert mamba.config.use_gate and mamba.config.share_qk and mamba.config.pre_conv
    assert mamba.model.layers[1].mixer.base_lr == 0.3
    assert mamba.model.layers[1].mixer.mini_batch_size == 8
    with pytest.raises(SettingsError, match="backbone mamba is of ttt-linear and ttt-mlp"):
        make_settings(PretrainSettings, {"name": "x", "sources": [], "backbone": "mamba"})


def test_inner_rate_warms_up() -> None:
    settings = tiny_settings(base_lr_start=0.01, base_lr_warmup_fraction=0.2)
    rates = [inner_base_lr(settings, step, 20, 0.1) for step in (0, 2, 4, 19)]
    assert rates == pytest.approx([0.01, 0.055, 0.1, 0.1])
    assert inner_base_lr(tiny_settings(), 0, 20, 0.1) == 0.1


def test_cosine_schedule() -> None:
    def factor(step: int) -> float:
        return learning_rate_factor(
            step, 100, warmup_fraction=0.1, decay_fraction=0.3, schedule="cosine", final_factor=0.01
        )

    assert [factor(0), factor(9)] == pytest.approx([0.1, 1.0])
    assert factor(54) == pytest.approx(0.505) and factor(99) == pytest.approx(0.01)
    falling = [factor(step) for step in range(9, 100)]
    assert falling == sorted(falling, reverse=True)


def test_runs_from_before_these_settings_go_on() -> None:
    settings = tiny_settings(architecture="llama", mini_batch_size=16)
    nothing = torch.zeros(0).numpy().astype("uint16")
    mixture = Mixture(nothing, nothing, {"files": {"train.bin": "0"}})
    extensible = ("name", "data_description", "num_tokens", "decay_fraction", "warmup_fraction",
                  "validate_every", "validation_batches", "checkpoint_every")  # fmt: skip
    later = ("architecture", "backbone", "mini_batch_size", "base_lr", "base_lr_start",
             "base_lr_warmup_fraction", "schedule", "final_learning_rate", "inner_norm",
             "learnable_w0", "learnable_lr", "feature_map", "tokenizer", "initial_parts")  # fmt: skip
    old = settings.model_dump(exclude={*extensible, *later})
    for source in (*old["sources"], *old["validation"]):
        del source["related"], source["id_prefix"]
    assert run_key(settings, mixture) == stable_hash(
        {"settings": old, "tokens": mixture.description["files"]}
    )
    assert run_key(tiny_settings(), mixture) != run_key(settings, mixture)
    # A cosine decides every step by the run's length.
    longer = {"num_tokens": 36 * 400}
    assert run_key(tiny_settings(**longer), mixture) == run_key(tiny_settings(), mixture)
    cosine = {"schedule": "cosine"}
    assert run_key(tiny_settings(**cosine, **longer), mixture) != run_key(
        tiny_settings(**cosine), mixture
    )


@pytest.mark.parametrize(
    ("size", "num_layers", "width", "num_heads", "num_steps", "rate"),
    [
        ("125m", 12, 768, 12, 4800, 3e-3),
        ("350m", 24, 1024, 16, 13500, 1.5e-3),
        ("760m", 24, 1536, 16, 29000, 1.25e-3),
        ("1.3b", 24, 2048, 32, 50000, 1e-3),
    ],
)
def test_recipes_are_the_paper_s_table(
    size: str, num_layers: int, width: int, num_heads: int, num_steps: int, rate: float
) -> None:
    """Sun et al. 2024, arXiv 2407.04620, table 2 and appendix C."""
    for name in ("ttt_linear", "ttt_mlp", "transformer"):
        recipe = load_settings(PretrainSettings, config_path(f"{name}_{size}"))
        assert recipe.architecture.replace("-", "_") == name
        assert (recipe.num_layers, recipe.hidden_size, recipe.num_heads) == (
            num_layers, width, num_heads,
        )  # fmt: skip
        plan = plan_pretraining(recipe)
        assert plan["num_steps"] == num_steps and plan["tokens_per_step"] == 2**19
        assert recipe.learning_rate == rate and recipe.final_learning_rate == 1e-5
        assert recipe.schedule == "cosine" and recipe.optimizer == "adamw"
        nominal = {"125m": 125, "350m": 350, "760m": 760, "1.3b": 1300}[size] * 1e6
        assert 0.85 < plan["num_parameters"] / nominal < 1.02
        if name != "transformer":
            model_lr = recipe.base_lr
            assert model_lr == (1.0 if name == "ttt_linear" else 0.1)
            assert recipe.backbone == "mamba" and recipe.mini_batch_size == 16
