"""Training: it learns, resumes to the bit, averages weights, decays what it should, fails clearly."""

import json
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
from torch import nn

from ttt_adapt.errors import (
    AdaptationError,
    FingerprintMismatchError,
    ModelError,
    SettingsError,
)
from ttt_adapt.settings import load_settings, make_settings, override, to_toml
from ttt_adapt.storage import sha256_file
from ttt_adapt.testing import silent
from ttt_adapt.vision.models import create_model
from ttt_adapt.vision.training import (
    VisionTrainSettings,
    WeightAverage,
    build_optimizer,
    classify,
    load_model,
    plan_training,
    settings_of,
    train,
)

TINY = {"dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}


def tiny_settings(**changes: Any) -> VisionTrainSettings:
    values: dict[str, Any] = {
        "name": "tiny",
        "model": "vit_tiny_mttt_linear",
        "overrides": TINY,
        "data": {
            "kind": "digits", "image_size": (8, 8), "in_channels": 1, "mean": (0.3,),
            "std": (0.4,), "crop_fraction": 1.0,
        },
        "batch_size": 32,
        "num_steps": 6,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "validate_every": 3,
        "log_every": 2,
        "checkpoint_every": 4,
        **changes,
    }  # fmt: skip
    return make_settings(VisionTrainSettings, values)


def run(settings: VisionTrainSettings, folder: Path, **options: Any) -> Any:
    return train(settings, folder, device="cpu", report=silent, **options)


def test_it_learns_and_leaves_a_model(tmp_path: Path) -> None:
    settings = tiny_settings(num_steps=60, ema_decay=0.9, record_inner_losses=16)
    said: list[str] = []
    done: list[int] = []
    result = train(
        settings, tmp_path, device="cpu", report=said.append,
        progress=lambda step, total, _: done.append(step),
    )  # fmt: skip
    assert result.finished and result.validation is not None and result.average is not None
    assert result.validation.top1 > 0.5 and result.average.top1 > 0.3
    assert done == list(range(1, 61)) and "step 60/60" in said[-1]
    rows = (tmp_path / "history.csv").read_text().splitlines()
    assert rows[0].startswith("step,epoch,train_loss_nats") and rows[-1].startswith("60,")
    recorded = json.loads((tmp_path / "inner_losses.json").read_text())
    assert [row["step"] for row in recorded] == [0, *range(3, 61, 3)]
    before, after = recorded[-1]["layers"][0]
    assert after < before
    summary = json.loads((tmp_path / "result.json").read_text())
    assert summary["validation"]["top1"] == result.validation.top1
    assert summary["classes"] == list("0123456789")
    assert load_settings(VisionTrainSettings, tmp_path / "train.toml") == settings
    assert settings_of(tmp_path / "average") == settings and settings_of(tmp_path.parent) is None

    from ttt_adapt.vision.data import evaluation_batches, open_images

    held = open_images(settings.data)
    for folder, expected in ((tmp_path, result.validation), (tmp_path / "average", result.average)):
        batches = evaluation_batches(held, settings.data, batch_size=100)
        found = classify(load_model(folder), batches)
        assert found.top1 == expected.top1 and found.num_images == len(held)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "model": "vision_ttt_tiny",
            "overrides": {**TINY, "drop_path": 0.2, "mini_batch_size": 2},
            "augmentation": {"crop": "random-resized", "flip": 0.5, "mixup_alpha": 0.8,
                             "cutmix_alpha": 1.0, "erasing": 0.3},
            "ema_decay": 0.9, "label_smoothing": 0.1, "micro_batch_size": 12,
            "max_grad_norm": 1.0, "precision": "bfloat16", "gradient_checkpointing": True,
        },
        {"model": "vit_tiny_mttt_mlp", "overrides": {**TINY, "strategy": "sgd", "steps": 2}},
    ],
)  # fmt: skip
def test_interrupted_and_continued_is_the_same_to_the_bit(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = tiny_settings(**changes)
    whole = run(settings, tmp_path / "whole")
    for stop in (2, 5, None):
        parts = run(settings, tmp_path / "parts", stop_after=stop)
        assert parts.finished == (stop is None)
    names = ["model.safetensors"] + (["average/model.safetensors"] if settings.ema_decay else [])
    for name in names:
        assert sha256_file(tmp_path / "whole" / name) == sha256_file(tmp_path / "parts" / name)
    assert parts.validation == whole.validation
    columns = [
        [row.split(",")[:7] for row in (tmp_path / part / "history.csv").read_text().splitlines()]
        for part in ("whole", "parts")
    ]
    assert columns[0][-1] == columns[1][-1]


def test_ctrl_c_within_a_step_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny_settings(), tmp_path / "whole")
    step = torch.optim.AdamW.step

    def interrupted(optimizer: Any, *options: Any) -> Any:
        found = step(optimizer, *options)
        # The weights are new, the step is not counted yet.
        signal.raise_signal(signal.SIGINT)
        return found

    told: list[str] = []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        train(tiny_settings(), tmp_path / "parts", device="cpu", report=told.append)
    assert told[-1].startswith("interrupted: saved after step 1;")
    parts = run(tiny_settings(), tmp_path / "parts")
    assert parts.validation == whole.validation
    name = "model.safetensors"
    assert sha256_file(tmp_path / "whole" / name) == sha256_file(tmp_path / "parts" / name)


def test_a_finished_run_is_done(tmp_path: Path) -> None:
    first = run(tiny_settings(), tmp_path)
    before = sha256_file(tmp_path / "model.safetensors")
    again = run(tiny_settings(), tmp_path)
    assert again.finished and again.validation == first.validation
    assert again.elapsed_s == first.elapsed_s
    assert sha256_file(tmp_path / "model.safetensors") == before


def test_micro_batches_add_up(tmp_path: Path) -> None:
    weights = []
    for size in (None, 8, 12):
        run(tiny_settings(micro_batch_size=size, num_steps=2), tmp_path / str(size))
        weights.append(load_file(tmp_path / str(size) / "model.safetensors"))
    for other in weights[1:]:
        for name, value in weights[0].items():
            assert float((value - other[name]).abs().max()) < 1e-4, name


def test_other_settings_are_refused(tmp_path: Path) -> None:
    run(tiny_settings(), tmp_path, stop_after=2)
    with pytest.raises(FingerprintMismatchError, match="other settings"):
        run(tiny_settings(learning_rate=1e-3), tmp_path)
    run(tiny_settings(log_every=1, validate_every=6), tmp_path)


def test_an_exploding_loss_is_named(tmp_path: Path) -> None:
    settings = tiny_settings(learning_rate=1e30, warmup_steps=0, num_steps=4)
    with pytest.raises(AdaptationError, match="the training loss became (nan|inf) at step"):
        run(settings, tmp_path)


def test_ctrl_c_saves(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny_settings(num_steps=100_000, checkpoint_every=100_000)))
    process = subprocess.Popen(
        [sys.executable, "-m", "ttt_adapt.cli.main", "vision", "train", "-c", str(recipe), "-o",
         str(tmp_path / "out"), "--device", "cpu"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 4/"):
            break
    os.kill(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert "interrupted: saved after step" in told
    (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    continued: list[str] = []
    settings = load_settings(VisionTrainSettings, recipe)
    train(settings, tmp_path / "out", device="cpu", stop_after=step + 1, report=continued.append)
    assert continued[0] == f"continuing after step {step} of 100000"


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny_settings(num_steps=4, validate_every=2)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "ttt_adapt.cli.main", "vision", "train", "-c", str(recipe), "-o",
         str(tmp_path / "two"), "--device", "cpu", "--json"],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads(done.stdout[done.stdout.index("{") :])
    one = run(tiny_settings(num_steps=4, validate_every=2), tmp_path / "one")
    assert two["validation"]["num_images"] == one.validation.num_images
    assert two["validation"]["loss_nats"] == pytest.approx(one.validation.loss_nats, abs=1e-3)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name, value in weights[0].items():
        assert float((value - weights[1][name]).abs().max()) < 1e-3, name


def test_a_run_may_start_from_a_model(tmp_path: Path) -> None:
    run(tiny_settings(num_steps=3), tmp_path / "first")
    data = tiny_settings().data.model_dump() | {"kind": "pair-same", "image_size": (8, 16)}
    second = tiny_settings(
        initial_model=str(tmp_path / "first"), data=data | {"num_validation_pairs": 50},
        num_steps=1, learning_rate=1e-9, final_learning_rate=0.0,
    )  # fmt: skip
    run(second, tmp_path / "second")
    old, new = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    for name, value in old.items():
        if name.startswith("head."):
            assert new[name].shape[0] == 2
        else:
            assert torch.allclose(value, new[name], atol=1e-6), name
    other = override(second, {"overrides.dim": 24})
    with pytest.raises(ModelError, match="weights don't fit"):
        run(other, tmp_path / "third")


def test_decay_spares_vectors_and_what_the_model_names() -> None:
    model = create_model("vision_ttt_tiny", image_size=8, **TINY)
    optimizer = build_optimizer(model, tiny_settings(weight_decay=0.3))
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(p)] for p in spared["params"]}
    assert "positions.table" in kept and "norm.weight" in kept and "head.bias" in kept
    assert {names[id(p)] for p in decayed["params"]} == set(names.values()) - kept
    assert all(p.ndim > 1 for p in decayed["params"])


def test_the_running_average_by_hand() -> None:
    model = nn.Linear(2, 1)
    average = WeightAverage(model, decay=0.5)
    expected = model.weight.detach().clone()
    for step in range(1, 12):
        with torch.no_grad():
            model.weight += 1.0
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    weight = average.model.weight
    assert isinstance(weight, torch.Tensor)
    assert torch.allclose(weight, expected) and not weight.requires_grad


def test_accuracy_by_hand() -> None:
    class Known(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1)

    logits = torch.tensor([[3.0, 2, 1, 0, -1, -2, 9], [0, 1, 2, 3, 4, 5, 6], [9, 1, 1, 1, 1, 1, 1]])
    labels = torch.tensor([6, 0, 0])
    halves = [(logits[:2], labels[:2]), (logits[2:], labels[2:])]
    model = Known().train()
    found = classify(model, ((rows.view(-1, 1, 1, 7), k) for rows, k in halves))
    expected = -logits.log_softmax(1)[torch.arange(3), labels].mean()
    assert (found.num_images, found.top1, found.top5) == (3, 2 / 3, 2 / 3)
    assert found.loss_nats == pytest.approx(float(expected), rel=1e-6)
    assert model.training


def test_a_plan_trains_nothing() -> None:
    started = time.monotonic()
    plan = plan_training(tiny_settings(num_steps=None, epochs=3, ema_decay=0.9))
    model = create_model(
        "vit_tiny_mttt_linear", image_size=8, in_channels=1, num_classes=10, **TINY
    )
    assert plan["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert plan["num_steps"] == 3 * (plan["num_images"] // 32) and plan["num_classes"] == 10
    assert plan["state_bytes"] == 20 * plan["num_parameters"]
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epochs": 2}, "expected epochs or num_steps, and not both"),
        ({"warmup_epochs": 1.0}, "expected warmup_epochs or warmup_steps, found both"),
        ({"final_learning_rate": 1.0}, "final_learning_rate: expected at most learning_rate"),
        ({"overrides": {"num_classes": 3}}, "num_classes follows from the data"),
        ({"ema_decy": 0.9}, "did you mean ema_decay"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        tiny_settings(**changes)


def test_unknown_models_and_devices(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vit_tiny_mttt_liner"):
        run(tiny_settings(model="vit_tiny_mttt_liner"), tmp_path)
    with pytest.raises(SettingsError, match="did you mean depth"):
        run(tiny_settings(overrides={"dept": 2}), tmp_path)
    with pytest.raises(SettingsError, match="device: expected auto or cpu"):
        train(tiny_settings(), tmp_path, device="tpu")


def test_one_step_by_hand(tmp_path: Path) -> None:
    """The loop's first step against the same in plain torch."""
    from ttt_adapt.vision.data import TrainingBatches, open_images
    from ttt_adapt.vision.training.building import build_model

    settings = tiny_settings(num_steps=1, warmup_steps=0, weight_decay=0.1, max_grad_norm=0.5)
    run(settings, tmp_path)
    model = build_model(settings, 10).train()
    images, labels = next(
        TrainingBatches(
            open_images(settings.data, training=True), settings.data, settings.augmentation,
            batch_size=32, seed=0,
        ).starting_at(0)
    )  # fmt: skip
    torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer = build_optimizer(model, settings)
    optimizer.step()
    found = load_file(tmp_path / "model.safetensors")
    for name, value in model.named_parameters():
        assert torch.allclose(found[name], value.detach(), atol=1e-6), name
