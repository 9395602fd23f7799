"""Two processes on one step's completions, through the launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.curriculum.training import read_history
from ttt_adapt.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path

from ttt_adapt.curriculum import GRPOSettings, Task, Verifier, train_curriculum


def letters(task, completion):
    return sum("a" <= letter <= "z" for letter in completion) / 4


if __name__ == "__main__":
    tasks = [Task(id=f"t{n}", kind="own", prompt="say " + "ab" * n) for n in range(3)]
    # Three groups of four: one is split between two processes.
    settings = GRPOSettings(
        num_steps=2, prompts_per_step=3, num_generations=4, learning_rate=1e-4,
        max_completion_tokens=4, max_prompt_tokens=40, device="cpu",
    )
    with Verifier(callables={"own": letters}) as verifier:
        result = train_curriculum(
            sys.argv[1], tasks, settings, Path(sys.argv[2]), verifier=verifier
        )
    assert result.num_rollouts == 24
"""


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    tiny_model(2).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
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
