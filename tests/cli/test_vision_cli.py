"""`ttt-adapt vision`: every command, and a user's mistakes."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from ttt_adapt import testing
from ttt_adapt.configs import config_names, config_path
from ttt_adapt.settings import load_settings
from ttt_adapt.vision.training import VisionTrainSettings

FEW = (
    "--set", "num_steps=3", "--set", "overrides.depth=1", "--set", "overrides.dim=12",
    "--set", "batch_size=16", "--set", "warmup_steps=1", "--device", "cpu",
)  # fmt: skip


invoke, invoke_json = partial(testing.invoke, "vision"), partial(testing.invoke_json, "vision")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits, trained by the command for three steps."""
    folder = tmp_path_factory.mktemp("vision") / "model"
    code, _, stderr = invoke("train", "-c", "vision_digits", "-o", folder, *FEW)
    assert code == 0, stderr
    assert "finished after 3 steps: top-1" in stderr
    return folder


def test_the_command_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ttt_adapt.cli.main", "vision", "--help"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    for name in ("train", "eval", "explain", "bench", "demo"):
        assert name in done.stdout


@pytest.mark.parametrize("name", ["train", "eval", "explain", "bench", "demo"])
def test_help_has_an_example(name: str) -> None:
    code, stdout, _ = invoke(name, "--help")
    assert code == 0 and f"Example: ttt-adapt vision {name}" in " ".join(stdout.split())


def test_train_says_what_it_would_do(tmp_path: Path) -> None:
    plan = invoke_json("train", "-c", "vision_pair_same", "-o", tmp_path / "out", "--dry-run")
    assert plan["num_steps"] == 1000 and plan["num_classes"] == 2
    assert not (tmp_path / "out").exists()


def test_train_stops_and_continues(tmp_path: Path) -> None:
    first = invoke_json(
        "train", "-c", "vision_digits", "-o", tmp_path, *FEW, "--seed", "3", "--stop-after", "2"
    )
    assert not first["finished"] and first["num_steps"] == 2
    second = invoke_json("train", "-c", "vision_digits", "-o", tmp_path, *FEW, "--seed", "3")
    assert second["finished"] and second["num_steps"] == 3


def test_eval_repeats_the_validation(model: Path) -> None:
    found = invoke_json("eval", model, "--device", "cpu", "--batch-size", "16")
    trained = json.loads((model / "result.json").read_text())["validation"]
    assert found == trained
    on_training = invoke_json("eval", model, "--split", "train", "--batch-size", "500")
    assert on_training["num_images"] > found["num_images"]
    code, stdout, _ = invoke("eval", model)
    assert code == 0 and "top-5" in stdout and "nats" in stdout


def test_explain_draws_files_and_samples(model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "red.png")
    found = invoke_json(
        "explain", model, "-i", tmp_path / "red.png", "-i", "flower", "-o", tmp_path / "out",
        "--image-size", "16", "--untrained",
    )  # fmt: skip
    assert {Path(path).name for path in found["files"]} == {
        "receptive-field.png", "gradient-map.png", "inner-losses.png", "explanation.json",
    }  # fmt: skip
    assert all(Path(path).is_file() for path in found["files"])
    assert set(found["receptive_fields"]) == {"trained", "untrained"}


def test_bench_measures_and_compares() -> None:
    found = invoke_json("bench", "--resolutions", "16,32", "--turns", "1", "--device", "cpu")
    assert len(found["rows"]) == 6 and len(found["lines"]) == 5
    assert {row["num_tokens"] for row in found["rows"]} == {1, 4}
    plan = invoke_json("bench", "--training", "--dry-run")
    assert plan["mode"] == "training" and plan["most_tokens"] == 6400


def test_demo_says_what_it_would_do() -> None:
    assert invoke_json("demo", "--dry-run") == {"num_runs": 46, "num_steps": 37500}
    plan = invoke_json("demo", "--parts", "digits", "--seeds", "4", "--steps", "7", "--dry-run")
    assert plan == {"num_runs": 5, "num_steps": 35}


def test_every_vision_recipe_names_a_model() -> None:
    from ttt_adapt.vision.training.building import build_model

    names = [name for name in config_names() if name.startswith("vision_")]
    assert len(names) == 8
    for name in names:
        settings = load_settings(VisionTrainSettings, config_path(name))
        assert settings.name == name
        if "pixel" not in name:  # positions of 50,176 pixels
            build_model(settings, 10)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "-c", "vision_digit", "-o", "{tmp}/o"], "vision_digit"),
        (["train", "-c", "vision_ttt_tiny", "-o", "{tmp}/o"], "no such folder of images"),
        (["train", "-c", "vision_digits", "-o", "{tmp}/o", "--set", "overrides.dept=1"],
         "did you mean depth"),
        (["train", "-c", "vision_digits", "-o", "{tmp}/o", "--set", "learning_rat=1"],
         "did you mean learning_rate"),
        (["train", "-c", "vision_digits", "-o", "{tmp}/o", "--device", "tpu"], "device"),
        (["eval", "{tmp}/none"], "none"),
        (["eval", "{model}", "--config", "vision_pair_same"], "expected images of its 10 classes"),
        (["eval", "{model}", "--split", "test"], "expected the split train or validation"),
        (["explain", "{model}", "-i", "{tmp}/no.png", "-o", "{tmp}/o"], "no.png: no such image"),
        (["explain", "{model}", "-o", "{tmp}/o", "--share", "2", "--image-size", "8"], "share"),
        (["bench", "--size", "huge"], "size: expected one of tiny"),
        (["bench", "--resolutions", "224,x"], "whole numbers separated by commas"),
        (["bench", "--resolutions", "100"], "multiples of 16, found 100"),
        (["demo", "--parts", "digit"], "expected parts of"),
        (["demo", "--seeds", "one"], "whole numbers"),
    ],
)  # fmt: skip
def test_one_line_and_exit_2(
    model: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    code, _, stderr = invoke(*(a.format(tmp=tmp_path, model=model) for a in arguments))
    assert code == 2, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and expected in lines[0]
