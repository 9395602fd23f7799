"""``benchmarks/gpu.py`` where there is no GPU; where there is one, ``make gpu`` runs it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--device", "cuda"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("gpu.py: expected a CUDA device")
    assert done.stderr.count("\n") == 1
