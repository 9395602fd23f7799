"""Running untrusted programs: what a caller sees of the sandbox."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.closing import Closing
from ttt_adapt.curriculum.sandbox import frames
from ttt_adapt.curriculum.sandbox.layout import plan_root, visible_packages
from ttt_adapt.curriculum.sandbox.strength import GUARANTEES, PROBE, Strength, advice
from ttt_adapt.curriculum.settings import SandboxSettings
from ttt_adapt.errors import SandboxError

GRACE_S = 20.0
"""Beyond a run's own time: for starting and ending it on a busy machine."""
MAX_PATIENCE = 4
"""A program that a busy machine leaves without a processor gets its wall time so many times."""
_BOOT = (
    "import sys; sys.path.insert(0, {root!r})\n"
    "from ttt_adapt.curriculum.sandbox.launcher import main\n"
    "sys.path.remove({root!r}); main({descriptor})"
)


@dataclass(frozen=True, slots=True)
class Execution:
    """How one run of a program went.

    Attributes:
        status: ``finished`` (it ended by itself with code 0), ``failed`` (another code or a
            signal), ``time``, ``memory`` or ``output`` (ended for exceeding a limit), or ``fault``:
            the sandbox or the machine failed, and nothing can be said of the program.
        detail: one line: of what, and for a failure the last line of standard error.
        stdout: its standard output, with U+FFFD for what is no UTF-8.
        stderr: the last 8 KiB of its standard error.
        exit_code: its own; ``None`` where it did not end by itself.
        cpu_s: processor seconds of the program itself.
        wall_s: seconds from its start to its end.
    """

    status: str
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Sandbox(Closing):
    """Starts programs in processes and namespaces of their own.

    What this machine offers is found out once, when the first program runs or :attr:`strength` is
    asked for. May be used from several threads; each run is a process.

    Args:
        settings: limits, and whether less than full isolation will do.

    Raises:
        SandboxError: (when it is first used) this machine does not isolate and
            ``settings.allow_weaker`` is false, or a package that programs may import is missing.
    """

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None
        self._strength: Strength | None = None

    @property
    def strength(self) -> Strength:
        """What holds programs on this machine."""
        with self._lock:
            if self._strength is None:
                self._strength = self._probe()
            return self._strength

    @contextlib.contextmanager
    def session(self) -> Iterator["Session"]:
        """Runs that belong together: they may know of each other's programs and inputs, not more."""
        strength = self.strength
        with self._lock:
            if self._zygote is not None and not self._zygote.is_alive():
                self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = _Zygote()
            channel = self._zygote.open_session()
        try:
            yield Session(channel, self.settings, is_isolated=strength.is_isolated)
        finally:
            channel.close()

    def run(self, source: str, stdin: str = "", *, cpu_s: float | None = None) -> Execution:
        """Run one program in a session of its own; see :meth:`Session.run`."""
        with self.session() as session:
            return session.run([source], stdin, cpu_s=cpu_s)

    def close(self) -> None:
        """End the process that programs are started from, and every run with it."""
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None

    def _probe(self) -> Strength:
        visible_packages(self.settings.packages)
        reason = unsupported_platform()
        if not reason:
            held, reason = self._try_isolation()
            if len(held) == len(GUARANTEES):
                return Strength("isolated", tuple(GUARANTEES))
        if not self.settings.allow_weaker:
            raise SandboxError(advice(reason))
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"expected Linux to run programs with limits, found {sys.platform}")
        return Strength("limits", ("limits",), reason)

    def _try_isolation(self) -> tuple[list[str], str]:
        """Guarantees that hold in namespaces, and what is amiss."""
        if self._zygote is None:
            self._zygote = _Zygote()
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.create_server(("127.0.0.1", 0)) as server,
            self._zygote.open_session() as channel,
        ):
            secret = Path(folder, "secret")
            secret.write_text("secret", encoding="utf-8")
            probe = PROBE % {
                "host_file": str(secret),
                "host_folder": folder,
                "port": server.getsockname()[1],
            }
            session = Session(channel, self.settings, is_isolated=True)
            execution = session.run([probe])
        if execution.status != "finished":
            return [], execution.detail
        found = json.loads(execution.stdout)
        held = [name for name in GUARANTEES if name == "limits" or found.get(name) is True]
        missing = [name for name in GUARANTEES if name not in held]
        return held, f"a program gets around: {', '.join(missing)}" if missing else ""


class Session:
    """Runs of one verification. Made by :meth:`Sandbox.session`; for one thread at a time."""

    def __init__(
        self, channel: socket.socket, settings: SandboxSettings, *, is_isolated: bool
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._is_isolated = is_isolated

    def run(
        self, sources: Sequence[str], stdin: str = "", *, cpu_s: float | None = None
    ) -> Execution:
        """Run the first of ``sources`` that compiles, as ``python program.py < stdin`` would.

        Args:
            cpu_s: less than ``settings.cpu_s``.
        """
        self.start("run", {"sources": list(sources)}, stdin=stdin, cpu_s=cpu_s)
        return self.wait()

    def start(
        self,
        mode: str,
        task: dict[str, Any],
        *,
        stdin: str = "",
        cpu_s: float | None = None,
        channel: socket.socket | None = None,
        extra_s: float = 0.0,
    ) -> None:
        """Start a run; :meth:`wait` for it before the next.

        Args:
            mode: a function of :mod:`ttt_adapt.curriculum.sandbox.program`: ``run``, ``serve``
                or ``check``.
            task: its arguments.
            channel: the socket that a program serves, or a check asks.
            extra_s: seconds beyond those of the settings, for a run that waits for another.
        """
        settings = self._settings
        cpu_s = min(cpu_s or settings.cpu_s, settings.cpu_s)
        self._wall_s = settings.wall_s * (cpu_s / settings.cpu_s)
        # A limit of a second is not there to measure how busy the machine is.
        self._wall_s = max(self._wall_s, min(10.0, settings.wall_s)) + extra_s
        isolated = self._is_isolated
        self._folder = None if isolated else tempfile.TemporaryDirectory(prefix="program-")
        packages = visible_packages(settings.packages)
        job = {
            "mode": mode,
            "task": task,
            "stdin": stdin,
            "isolated": isolated,
            "folder": self._folder.name if self._folder else "",
            "environment": {} if self._folder is None else {"TMPDIR": self._folder.name},
            "sys_path": [*_standard_library(), *packages.sys_path(isolated=isolated)],
            "root": plan_root(packages, settings.file_mb * 2**20) if isolated else {},
            "limits": {
                "cpu_s": cpu_s,
                "wall_s": self._wall_s,
                "longest_s": self._wall_s * MAX_PATIENCE,
                "memory_bytes": settings.memory_mb * 2**20,
                "output_bytes": settings.output_mb * 2**20,
                "file_bytes": settings.file_mb * 2**20,
                "num_files": 256,
                # Without namespaces all that the user runs would count.
                "num_processes": settings.num_processes if isolated else 0,
            },
        }
        self._cpu_s = cpu_s
        with contextlib.suppress(OSError):
            frames.send(self._channel, job, (channel.fileno(),) if channel is not None else ())

    @property
    def longest_s(self) -> float:
        """Seconds after which the run that was started has certainly ended."""
        return self._wall_s * MAX_PATIENCE + GRACE_S

    def wait(self, patience_s: float | None = None) -> Execution:
        """The outcome of the run that was started; a fault where it takes more than ``patience_s``.

        After that, or when the session ends, the run is ended.
        """
        try:
            self._channel.settimeout(self.longest_s if patience_s is None else patience_s)
            outcome = frames.receive(self._channel)
        except (OSError, frames.BadFrame) as error:
            outcome = {"fault": f"the launcher gave no answer: {error}"}
        finally:
            if self._folder is not None:
                self._folder.cleanup()
        if outcome is None:
            outcome = {"fault": "the launcher is gone"}
        return _execution(outcome, self._cpu_s)


class _Zygote:
    """The process that launchers are forked from; see :mod:`.launcher`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[3])
        boot = _BOOT.format(root=root, descriptor=theirs.fileno())
        base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        self._process = subprocess.Popen(
            # No site-packages, no user's paths, no environment: the same everywhere.
            [base, "-S", "-s", "-P", "-B", "-c", boot],
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        self._control = ours

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def open_session(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                frames.send(self._control, {}, (theirs.fileno(),))
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandbox's launcher is gone ({error}); try again") from None
        return ours

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def unsupported_platform() -> str:
    """Why no sandbox can work here; empty on Linux."""
    return "" if sys.platform.startswith("linux") else f"{sys.platform} has no namespaces"


def _standard_library() -> list[str]:
    """The folders of a fresh interpreter's path that hold the standard library."""
    major_minor = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base = Path(sys.base_prefix, sys.platlibdir, major_minor)
    exec_base = Path(sys.base_exec_prefix, sys.platlibdir, major_minor)
    return list(dict.fromkeys([str(base), str(exec_base / "lib-dynload")]))


def _execution(outcome: dict[str, Any], cpu_limit_s: float) -> Execution:
    if "fault" in outcome:
        return Execution("fault", f"sandbox: {outcome['fault']}")
    number = outcome.get("signal", 0)
    exit_code = outcome.get("exit")
    cpu_s = float(outcome.get("cpu_s", 0.0))
    stderr = outcome["stderr"]
    stopped = outcome["stopped"]
    if stopped == "busy":
        status, detail = "fault", "the machine was too busy to give the program its time"
    elif stopped == "abandoned":
        status, detail = "fault", "nobody waited for the program"
    elif stopped == "wall":
        status, detail = "time", f"more than {outcome['wall_s']:.0f} s"
    elif stopped == "memory":
        status, detail = "memory", "its processes together hold more memory than allowed"
    elif stopped == "output":
        status, detail = "output", "more output than allowed"
    elif number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= 0.9 * cpu_limit_s):
        status, detail = "time", f"more than {cpu_limit_s:g} s of processor time"
    elif number:
        status, detail = "failed", f"ended by signal {number}"
    elif exit_code != 0:
        lines = stderr.strip().splitlines()
        status, detail = "failed", (lines[-1][:300] if lines else f"exit code {exit_code}")
    else:
        status, detail = "finished", ""
    return Execution(
        status, detail, outcome["stdout"], stderr, exit_code, cpu_s, float(outcome["wall_s"])
    )
