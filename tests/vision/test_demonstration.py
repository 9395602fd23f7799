"""The demonstration: its runs, its sums, and a small one from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ttt_adapt.errors import SettingsError
from ttt_adapt.vision.demonstration import (
    ARMS,
    INNER_STEPS,
    PARTS,
    TARGETS,
    ArmResult,
    demonstration_runs,
    run_demonstration,
)
from ttt_adapt.vision.demonstration_photos import TILE, tiles, write_tiles
from ttt_adapt.vision.models import create_model


def test_runs_are_the_issue_of_the_table() -> None:
    runs = demonstration_runs(seeds=(0, 1, 2))
    assert len(runs) == 3 * (2 * len(ARMS) + len(INNER_STEPS))
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs:
        settings = run.settings
        assert settings.seed == run.seed and settings.batch_size == 64
        model: Any = create_model(
            settings.model, image_size=settings.data.image_size, in_channels=1,
            num_classes=2, **settings.overrides,
        )  # fmt: skip
        width = (model.settings.dim, model.settings.depth, model.settings.num_heads)
        assert width == (48, 3, 3)
        if run.part == "pair-same":
            assert settings.num_steps == 1000 and settings.learning_rate == 2e-3
            assert model.patch_embed.grid_size(*settings.data.image_size) == (2, 4)
        if run.arm == "Vision-TTT":
            assert not model.settings.dwconv and model.settings.mini_batch_size == 4
    steps = {run.arm: run.settings.overrides["steps"] for run in runs if run.part == "steps"}
    assert steps == {f"T = {count}": count for count in INNER_STEPS}
    assert all(set(targets) <= set(ARMS) for targets in TARGETS.values())


@pytest.mark.parametrize(("parts", "seeds"), [(["pairs"], [0]), ([], [0]), (["digits"], [])])
def test_unknown_parts(parts: list[str], seeds: list[int]) -> None:
    with pytest.raises(SettingsError, match="expected parts of pair-same, digits, steps, photos"):
        demonstration_runs(parts, seeds=seeds)


def test_targets_are_of_the_mean() -> None:
    found = ArmResult("digits", "MTTT-MLP", (0, 1), (92.0, 96.0), 93.0, 1.0)
    assert found.mean == 94.0 and found.is_reached
    assert not ArmResult("digits", "MTTT-MLP", (0,), (92.0,), 93.0, 1.0).is_reached


def test_tiles_keep_to_their_side(tmp_path: Path) -> None:
    image = Image.new("L", (300, 200))
    assert all(tile.size == (TILE, TILE) for tile in tiles(image)) and len(tiles(image)) == 6 * 3
    count = write_tiles(tmp_path)
    assert count == len(list(tmp_path.rglob("*.png"))) == write_tiles(tmp_path)
    for split in ("train", "validation"):
        assert len(list((tmp_path / split).iterdir())) == 6


@pytest.mark.slow
def test_a_small_demonstration(tmp_path: Path) -> None:
    options = {"parts": ("steps", "photos"), "seeds": (0,), "num_steps": 2, "workers": 1}
    said: list[str] = []
    result = run_demonstration(tmp_path, report=said.append, **options)  # type: ignore[arg-type]
    assert [arm.arm for arm in result.arms] == [f"T = {count}" for count in INNER_STEPS]
    for count, arm in zip(INNER_STEPS, result.arms, strict=True):
        assert [len(layer) for layer in arm.inner_losses] == [count + 1] * 3
    assert {path.name for path in result.pictures} == {
        "gradient-map.png", "inner-losses.png", "inner-steps.png", "receptive-field.png",
    }  # fmt: skip
    assert all(path.is_file() for path in result.pictures)
    assert result.photo_top1 is not None and result.missed == ()
    saved = json.loads((tmp_path / "demonstration.json").read_text())
    assert saved["arms"][1]["mean"] == result.arms[1].mean
    assert len(said) == len(INNER_STEPS) + 1
    assert set(PARTS) >= {"steps", "photos"}
