"""Several processes on one batch, through the real launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ttt_adapt.config import SourceSettings, to_toml
from ttt_adapt.storage import sha256_file
from ttt_adapt.testing import tiny_pretraining, write_training_corpus


def write_recipe(folder: Path) -> Path:
    write_training_corpus(folder)
    settings = tiny_pretraining(
        sources=(SourceSettings(path="corpus.jsonl"),), num_tokens=32 * 5 * 8, batch_size=5
    )
    path = folder / "recipe.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    return path


def launch(
    recipe: Path, out: Path, num_processes: int, *options: str
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = ["pretrain", "-c", str(recipe), "--data-root", str(recipe.parent), "-o", str(out)]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ttt_adapt.cli.main", *command, *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def train(recipe: Path, out: Path, num_processes: int, *options: str) -> str:
    done = launch(recipe, out, num_processes, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def losses(folder: Path) -> list[list[float]]:
    rows = (folder / "loss.csv").read_text().splitlines()[1:]
    return [[float(cell) for cell in row.split(",")[:3] if cell] for row in rows]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose folder ``two`` holds what two uninterrupted processes made of it."""
    path = write_recipe(tmp_path_factory.mktemp("distributed"))
    said = train(path, path.parent / "two", 2)
    assert said.count("step 8/8") == 1
    return path


def test_two_processes_learn_what_one_does(recipe: Path) -> None:
    folder = recipe.parent
    train(recipe, folder / "one", 1)
    for one, two in zip(losses(folder / "one"), losses(folder / "two"), strict=True):
        assert two == pytest.approx(one, abs=2e-3)
    weights = [load_file(folder / name / "model.safetensors") for name in ("one", "two")]
    for key, value in weights[0].items():
        assert float((value.float() - weights[1][key].float()).abs().max()) < 2e-3


def test_two_processes_continue_to_the_bit(recipe: Path) -> None:
    folder = recipe.parent
    train(recipe, folder / "parts", 2, "--stop-after", "3")
    assert "continuing after step 3" in train(recipe, folder / "parts", 2)
    name = "model.safetensors"
    assert sha256_file(folder / "two" / name) == sha256_file(folder / "parts" / name)


def test_fewer_sequences_than_processes(recipe: Path) -> None:
    out = recipe.parent / "too-few"
    done = launch(recipe, out, 2, "--set", "batch_size=1")
    assert done.returncode != 0 and not out.exists()
    assert "expected a sequence for each of 2 processes, found 1" in done.stderr
