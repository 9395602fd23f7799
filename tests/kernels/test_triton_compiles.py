"""Triton's compiler takes the kernels, for GPUs that need not be there; see compile_triton.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes a program may have on the GPUs of capability 8.0 and up that have least."""


def compile_operator(folder: Path, operator: str, dtype: str, capability: int) -> dict[str, int]:
    """Shared memory of each kernel, in a process without the interpreter and with a cache of its own."""
    done = subprocess.run(
        [sys.executable, "tests/kernels/compile_triton.py", operator, dtype, str(capability)],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("operator", "dtype", "capability"),
    [
        ("ttt_linear", "bfloat16", 90),
        pytest.param("ttt_linear", "float32", 80, marks=pytest.mark.slow),
        pytest.param("ttt_mlp", "bfloat16", 90, marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles(tmp_path: Path, operator: str, dtype: str, capability: int) -> None:
    found = compile_operator(tmp_path, operator, dtype, capability)
    assert {name.strip("_") for name in found} == {
        "forward_kernel",
        "backward_kernel",
        "decode_kernel",
    }
    assert max(found.values()) <= SMALLEST_SHARED_MEMORY
