"""Runs that are stopped, by Ctrl-C, an error or a kill, and go on as if they had not been."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.curriculum import TrainingResult
from ttt_adapt.curriculum.training import TrainingProgress, read_history
from ttt_adapt.testing import own_tasks, practise, save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SETTINGS: dict[str, Any] = {
    "num_steps": 5, "prompts_per_step": 2, "prompts_per_update": 1, "max_completion_tokens": 4,
    "save_every": 2, "warmup_steps": 2, "reselect_every": 3, "band": (0.0, 1.0),
}  # fmt: skip


def run(
    model: Path,
    out: Path,
    progress: Callable[[TrainingProgress], None] | None = None,
    **changes: Any,
) -> TrainingResult:
    return practise(model, out, tasks=own_tasks(5), progress=progress, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert run(model, out).num_steps == 5
    return out


def assert_same(out: Path, whole: Path) -> None:
    """Weights to the bit, and the history but for its seconds."""
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (out, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    def rows(folder: Path) -> list[tuple[Any, ...]]:
        return [
            (r.step, r.reward, r.loss, r.gradient_norm, r.num_tokens, r.zero_signal_groups)
            for r in read_history(folder)
        ]

    assert rows(out) == rows(whole)


def test_an_error_between_checkpoints(model: Path, whole: Path, tmp_path: Path) -> None:
    def fail(progress: TrainingProgress) -> None:
        if progress.record.step == 3:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(model, tmp_path, fail)
    assert len(read_history(tmp_path)) == 3
    seen: list[int] = []
    run(model, tmp_path, lambda progress: seen.append(progress.record.step))
    # The third step, after the last checkpoint, is done again.
    assert seen == [3, 4, 5]
    assert_same(tmp_path, whole)


def test_ctrl_c_ends_after_the_step_and_saves(model: Path, whole: Path, tmp_path: Path) -> None:
    def interrupt(progress: TrainingProgress) -> None:
        if progress.record.step == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "model").exists()
    seen: list[int] = []
    run(model, tmp_path, lambda progress: seen.append(progress.record.step))
    assert seen == [4, 5]
    assert_same(tmp_path, whole)


def test_a_second_ctrl_c_ends_at_once(model: Path, whole: Path, tmp_path: Path) -> None:
    def insist(progress: TrainingProgress) -> None:
        if progress.record.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, insist)
    seen: list[int] = []
    run(model, tmp_path, lambda progress: seen.append(progress.record.step))
    assert seen == [3, 4, 5]
    assert_same(tmp_path, whole)


def test_a_longer_run_is_the_same_run(model: Path, whole: Path, tmp_path: Path) -> None:
    run(model, tmp_path, num_steps=4, save_every=100)
    assert len(read_history(tmp_path)) == 4
    run(model, tmp_path)
    assert_same(tmp_path, whole)


CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads({threads})
sys.path.insert(0, {tests!r})
import test_grpo_resume as tests
tests.run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_result(model: Path, whole: Path, tmp_path: Path) -> None:
    code = CHILD.format(threads=torch.get_num_threads(), tests=str(Path(__file__).parent))
    child = subprocess.Popen([sys.executable, "-c", code, str(model), str(tmp_path / "run")])
    history = tmp_path / "run" / "history.jsonl"
    deadline = time.monotonic() + 300
    try:
        while time.monotonic() < deadline and child.poll() is None:
            if history.is_file() and history.read_bytes().count(b"\n") >= 3:
                break
            time.sleep(0.005)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL, "it was killed while it ran"
    assert not (tmp_path / "run" / "result.json").exists()
    run(model, tmp_path / "run")
    assert_same(tmp_path / "run", whole)
