"""What a sandbox says of itself, and what it does on a machine that isolates nothing."""

import os
from pathlib import Path

import pytest

from ttt_adapt.curriculum import Sandbox, SandboxSettings, StdinTest, Verifier
from ttt_adapt.curriculum.sandbox.layout import PACKAGES, plan_root, visible_packages
from ttt_adapt.curriculum.sandbox.running import _execution
from ttt_adapt.curriculum.sandbox.strength import GUARANTEES, Strength
from ttt_adapt.curriculum.tasks import CodeTests, Task
from ttt_adapt.errors import SandboxError, SettingsError
from ttt_adapt.settings import make_settings


class Unisolated(Sandbox):
    """A machine that refuses namespaces."""

    def _try_isolation(self) -> tuple[list[str], str]:
        return [], "unshare: Operation not permitted"


def test_the_strength_is_probed_and_said(sandbox: Sandbox) -> None:
    assert sandbox.strength == Strength("isolated", tuple(GUARANTEES))
    assert sandbox.strength.summary() == (
        "sandbox: isolated; holds: files, network, processes, privileges, limits"
    )


def test_weaker_tiers_need_a_flag() -> None:
    task = Task("t", "code", "f", tests=CodeTests((StdinTest("", "1"),)))
    with Unisolated() as refused, Verifier(sandbox=refused) as verifier:
        with pytest.raises(SandboxError, match="allow_weaker") as caught:
            verifier.verify(task, "```\nprint(1)\n```")
        assert "unshare: Operation not permitted" in str(caught.value)
        with pytest.raises(SandboxError, match="unprivileged user namespaces"):
            verifier.require([task])
        verifier.require([Task("t", "exact", "p", "a")])


def test_with_the_flag_limits_still_hold() -> None:
    settings = SandboxSettings(
        allow_weaker=True, cpu_s=1.0, wall_s=3.0, output_mb=1, memory_mb=256, packages=("numpy",)
    )
    with Unisolated(settings) as weak:
        assert weak.strength.tier == "limits"
        assert weak.strength.summary() == (
            "sandbox: limits; holds: limits; does NOT hold: files, network, processes, privileges "
            "(unshare: Operation not permitted)"
        )
        echo = "import os, numpy\nprint(input(), os.environ['HOME'], os.getcwd() == os.path.realpath(os.environ['TMPDIR']))"
        assert weak.run(echo, "5\n").stdout == "5 /tmp True\n"
        assert weak.run("while True: print('x' * 10000)").status == "output"
        assert weak.run("bytearray(10**9)").detail == "MemoryError"
        leaving = """
import os
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "12345.6789"])
"""
        assert weak.run(leaving).status == "finished"
        assert weak.run(leaving + "\nimport time\ntime.sleep(60)").status == "time"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _there(path)]
    assert not any(b"12345.6789" in command for command in commands)


def _there(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def test_a_busy_machine_is_no_fault_of_the_program() -> None:
    outcome = {"stdout": "", "stderr": "", "stopped": "busy", "wall_s": 4.0}
    execution = _execution(outcome, 1.0)
    assert execution.status == "fault"
    assert "too busy" in execution.detail


def test_a_session_that_is_left_ends_its_run(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        source = "import os\nos.execv('/bin/sleep', ['sleep', '24680.1357'])"
        session.start("run", {"sources": [source]})
        assert session.wait(patience_s=0.2).status == "fault"
    for _ in range(500):
        commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if _there(p)]
        if not any(b"24680.1357" in command for command in commands):
            return
        os.sched_yield()
        import time

        time.sleep(0.02)
    raise AssertionError("the program goes on although nobody waits for it")


def test_packages_must_be_there() -> None:
    with (
        Sandbox(SandboxSettings(packages=("no_such_package",))) as made,
        pytest.raises(SandboxError, match="no_such_package.*install it or take it out"),
    ):
        _ = made.strength


def test_the_root_holds_the_interpreter_and_chosen_packages_alone() -> None:
    plan = plan_root(visible_packages(("numpy",)), 2**20)
    targets = [target for _, target in plan["binds"]]
    assert f"{PACKAGES}/numpy" in targets
    assert not any("site-packages" in target for target in targets)
    assert str(Path.home()) not in targets
    assert plan["tmp_bytes"] == 2**20
    assert plan_root(visible_packages(()), 1)["binds"]


def test_settings_contradict() -> None:
    with pytest.raises(SettingsError, match="wall_s .* at least cpu_s"):
        make_settings(SandboxSettings, {"cpu_s": 10.0, "wall_s": 5.0})
