"""Fast weights in the pipeline and on the command line: read once, predict often."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt import pipeline
from ttt_adapt.config import ExperimentSettings, ModelSettings, override
from ttt_adapt.errors import FingerprintMismatchError, ModelError, UserError
from ttt_adapt.models import LanguageModel, load_language_model
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

TEXT = sample_text(7, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reading") / "ttt"
    tiny_model(3, architecture="ttt_linear").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return load_language_model(ModelSettings(name=str(folder), device="cpu"))


@pytest.fixture
def reading(settings: ExperimentSettings, folder: Path) -> ExperimentSettings:
    return override(settings, {"model.name": str(folder), "adaptation.method": "fast-weights"})


def test_predict_by_fast_weights(
    world: Path, reading: ExperimentSettings, lm: LanguageModel
) -> None:
    found = pipeline.predict(TEXT, world / "index", settings=reading, lm=lm)
    base, one, four = (score.bits_per_byte for score in found.scores)
    assert not found.failure and len({base, one, four}) == 3
    assert found.num_steps == 4 and found.learned is not None and found.learned.num_tokens > 100
    assert [source.score for source in found.sources] == sorted(
        (source.score for source in found.sources), reverse=True
    )


def test_state_of_the_selected_passages_predicts_as_the_adapter_does(
    world: Path, reading: ExperimentSettings, lm: LanguageModel, tmp_path: Path
) -> None:
    found = pipeline.predict(TEXT, world / "index", settings=reading, lm=lm)
    path = tmp_path / "some.state"
    read = pipeline.read_state(path, world / "index", text=TEXT, settings=reading, lm=lm)
    assert read.num_passages == 4 and read.num_bytes == path.stat().st_size
    base, adapted = pipeline.predict_from_state(TEXT, path, settings=reading, lm=lm)
    assert base.nats == found.scores[0].nats
    assert adapted.nats == pytest.approx(found.scores[-1].nats, rel=1e-6)


def test_everything_is_read_at_constant_size(
    world: Path, reading: ExperimentSettings, lm: LanguageModel, tmp_path: Path
) -> None:
    said: list[tuple[int, int]] = []
    options: dict[str, Any] = {"settings": reading, "lm": lm}
    index = pipeline.open_index(world / "index")
    few = pipeline.read_state(tmp_path / "few", index, max_passages=2, **options)
    most = pipeline.read_state(
        tmp_path / "most",
        index,
        max_passages=40,
        progress=lambda done, total: said.append((done, total)),
        **options,
    )
    assert (few.num_passages, most.num_passages) == (2, 40)
    assert abs(few.num_bytes - most.num_bytes) < 64 and said[-1] == (40, 40)
    base, adapted = pipeline.continue_from_state(
        "alpha", tmp_path / "most", max_new_tokens=5, **options
    )
    assert base and adapted and base != adapted


def test_mistakes(
    world: Path, reading: ExperimentSettings, settings: ExperimentSettings, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="layers are all TTT"):
        pipeline.read_state(tmp_path / "state", world / "index", settings=settings)
    assert not (tmp_path / "state").exists()
    pipeline.read_state(tmp_path / "state", world / "index", text=TEXT, settings=reading)
    with pytest.raises(UserError, match="empty"):
        pipeline.predict_from_state(" ", tmp_path / "state", settings=reading)
    other = tmp_path / "other"
    tiny_model(4, architecture="ttt_linear").save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    changed = override(reading, {"model.name": str(other)})
    with pytest.raises(FingerprintMismatchError):
        pipeline.predict_from_state(TEXT, tmp_path / "state", settings=changed)


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ttt_adapt.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    return done


def test_commands(world: Path, folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "corpus.state"
    options = ("--index", world / "index", "--model", folder)
    done = run("read", "--all", "--max-passages", "6", *options, "-o", state, "--json")
    assert json.loads(done.stdout)["num_passages"] == 6
    done = run("predict", TEXT, "--state", state, "--model", folder, "--json")
    base, adapted = json.loads(done.stdout)["bits_per_byte"]
    assert base != adapted
    done = run("predict", TEXT, *options, "--adapter", "fast-weights", "-n", "3", "--json")
    values = json.loads(done.stdout)["bits_per_byte"]
    assert values[0] == base and values[-1] != base
    assert "expected --index or --state, found neither" in run("predict", TEXT, code=2).stderr
    wrong = run("predict", TEXT, "--index", world / "index", "--adapter", "fast-weights",
                "--model", world / "model", code=2)  # fmt: skip
    assert "all TTT" in wrong.stderr and "Traceback" not in wrong.stderr


def test_commands_with_the_bundled_model(world: Path, tmp_path: Path) -> None:
    options = ("--index", world / "index", "--model", "ttt-linear-7m", "-n", "3", "--json")
    done = run("predict", TEXT, *options, "--adapter", "fast-weights")
    values = json.loads(done.stdout)["bits_per_byte"]
    state = tmp_path / "some.state"
    done = run("read", TEXT, *options, "-o", state)
    assert json.loads(done.stdout)["num_passages"] == 3
    done = run("predict", TEXT, "--state", state, "--model", "ttt-linear-7m", "--json")
    base, adapted = json.loads(done.stdout)["bits_per_byte"]
    assert base == values[0] != adapted
    assert adapted == pytest.approx(values[-1], rel=1e-6)
