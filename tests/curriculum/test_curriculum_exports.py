"""The room's public names, and what importing it must not cost."""

import subprocess
import sys
from types import ModuleType

import pytest

from ttt_adapt import curriculum
from ttt_adapt.curriculum import sandbox


@pytest.mark.parametrize("room", [curriculum, sandbox])
def test_every_public_name_loads(room: ModuleType) -> None:
    assert len(set(room.__all__)) == len(room.__all__)
    for name in room.__all__:
        assert getattr(room, name).__name__ == name
    assert set(room.__all__) <= set(dir(room))
    with pytest.raises(AttributeError, match="has no attribute 'teach'"):
        _ = room.teach


def test_public_names_of_the_issue() -> None:
    for name in ("Task", "verify", "Verdict", "pass_at_k"):
        assert name in curriculum.__all__


def test_verifying_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import ttt_adapt.curriculum\n"
        "assert not {'numpy', 'pydantic', 'ttt_adapt.curriculum.tasks'} & set(sys.modules)\n"
        "from ttt_adapt.curriculum import Task, Verifier, read_tasks, import_tasks, decontaminate\n"
        "Verifier().verify(Task('t', 'exact', 'p', 'a'), 'a')\n"
        "heavy = {'torch', 'transformers', 'datasets', 'sympy', 'math_verify', 'faiss'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_process_is_left_when_the_interpreter_ends() -> None:
    """``verify`` keeps processes for the next call; they end with the interpreter, however it ends."""
    code = (
        "from ttt_adapt.curriculum import CodeTests, StdinTest, Task, verify\n"
        "verify(Task('t', 'math', 'p', 'x'), r'\\boxed{x + 1}')\n"
        "task = Task('t', 'code', 'p', tests=CodeTests((StdinTest('', '1'),)))\n"
        "assert verify(task, '```\\nprint(1)\\n```').reward == 1.0\n"
        "import os, sys\n"
        "from ttt_adapt.curriculum.sandbox.processes import descendants\n"
        "print(*descendants(os.getpid())[1:], flush=True)\n"
        "{ending}"
    )
    import os
    import time

    for ending in ("", "os.kill(os.getpid(), 9)"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code.replace("{ending}", ending)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        processes = [int(word) for word in done.stdout.split()]
        assert len(processes) >= 2
        for _ in range(500):
            left = [pid for pid in processes if os.path.exists(f"/proc/{pid}/exe")]  # noqa: PTH110
            if not left:
                break
            time.sleep(0.02)
        assert not left
