"""Two processes on one step's completions, through the launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.curriculum.training import read_history
from ttt_adapt.testing import save_tiny_model

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path

from ttt_adapt.testing import own_tasks, practise

if __name__ == "__main__":
    # Three groups of four: one is split between two processes.
    result = practise(
        Path(sys.argv[1]), Path(sys.argv[2]), tasks=own_tasks(3), learning_rate=1e-4,
        max_completion_tokens=4,
    )
    assert result.num_rollouts == 24
"""


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "m")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    for num in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
        done = subprocess.run(
            [
                sys.executable,
                *launcher,
                str(program),
                str(tmp_path / "m"),
                str(tmp_path / f"{num}"),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    # Completions have random numbers of their own, so that they are the same ones.
    alone, both = (read_history(tmp_path / f"{num}") for num in (1, 2))
    for one, two in zip(alone, both, strict=True):
        assert (one.reward, one.num_rollouts, one.num_tokens) == (
            two.reward,
            two.num_rollouts,
            two.num_tokens,
        )
    one_w, two_w = (
        load_file(tmp_path / f"{num}" / "model" / "model.safetensors") for num in (1, 2)
    )
    for name, value in one_w.items():
        # Adam divides a gradient by its size, which may turn rounding into a step of the rate.
        assert float((value - two_w[name]).abs().median()) < 1e-6, name
        torch.testing.assert_close(value, two_w[name], rtol=0.0, atol=4e-4)
