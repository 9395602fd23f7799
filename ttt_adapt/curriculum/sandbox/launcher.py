"""The process that starts untrusted programs: each in a fresh process, and in fresh namespaces.

    caller ── socket ── zygote ─┬─ launcher (one for each verification) ── run ── init ── program
                                └─ …

The zygote holds nothing but the standard library. For each verification it forks a launcher, so
that no run finds another verification's programs or inputs in its memory; expected outputs are
never sent here at all. For each run the launcher forks a process that enters new namespaces; its
child is their first process, builds the private root, and starts the program without privileges.
When that first process ends, the kernel kills every other process of the namespace.

Standard library only.
"""

import json
import os
import selectors
import signal
import socket
import time
from typing import Any

from ttt_adapt.curriculum.sandbox import frames, syscalls
from ttt_adapt.curriculum.sandbox.entering import USER, enter
from ttt_adapt.curriculum.sandbox.processes import (
    descendants,
    kill,
    oom_kills,
    own_bytes,
    proportional_bytes,
    write_text,
)

HOST_USER = 1_990_000_000
"""Who it is outside where the launcher is root: nobody that owns anything."""
MEMORY_CHECK_S = 0.1
STDERR_BYTES = 8192
"""The end of what a program writes there is kept, and it may write 64 MiB."""


def main(descriptor: int) -> None:
    """The zygote: one launcher for each socket that arrives on ``descriptor``, until it closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    while True:
        message, descriptors = frames.receive_with_descriptors(control, 1)
        if message is None:
            return
        (session,) = descriptors
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_launch(socket.socket(fileno=session)))
        os.close(session)


def _launch(session: socket.socket) -> int:
    """Answer the runs of one verification, one after the other."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    while True:
        job, descriptors = frames.receive_with_descriptors(session, 1)
        if job is None:
            return 0
        try:
            outcome = _Run(job, descriptors, session).outcome()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the program's fault
            outcome = {"fault": f"{type(error).__name__}: {error}"}
        for descriptor in descriptors:
            os.close(descriptor)
        frames.send(session, outcome)


class _Run:
    """One program, from its fork to its end."""

    def __init__(self, job: dict[str, Any], descriptors: list[int], session: socket.socket) -> None:
        self._job = job
        self._session = session
        self._limits = job["limits"]
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._status = b""
        self._stopped = ""
        ends = {name: os.pipe() for name in ("stdout", "stderr", "status", "go")}
        self._ends = {name: pair[name == "go"] for name, pair in ends.items()}
        others = {name: pair[name != "go"] for name, pair in ends.items()}
        self._began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            enter(job, others | {"channel": descriptors[0] if descriptors else -1})
        for other in others.values():
            os.close(other)

    def outcome(self) -> dict[str, Any]:
        kills_before = oom_kills()
        try:
            if self._job["isolated"] and (fault := self._map_users()):
                return {"fault": fault}
            self._watch()
        finally:
            self._kill()
            for end in self._ends.values():
                os.close(end)
        result = {
            "stdout": self._kept["stdout"].decode("utf-8", "replace"),
            "stderr": self._kept["stderr"].decode("utf-8", "replace"),
            "stopped": self._stopped,
            "wall_s": time.monotonic() - self._began,
        }
        lines = self._status.decode("ascii", "replace").splitlines()
        report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        if "fault" in report:
            return {"fault": report["fault"]}
        if not report and not self._stopped:
            return {"fault": "the sandbox's first process died before the program did"}
        if (
            report.get("signal") == signal.SIGKILL
            and not self._stopped
            and oom_kills() > kills_before
        ):
            return {"fault": "the system ran out of memory"}
        return result | report

    def _map_users(self) -> str:
        """Give the new user namespace its users; why not, where that fails."""
        if os.read(self._ends["status"], 1) != b"U":
            rest = os.read(self._ends["status"], 4096)
            return str(json.loads(rest)["fault"]) if rest.startswith(b"{") else "no namespaces"
        user, group = os.geteuid(), os.getegid()
        maps = [(f"{USER} {user} 1\n", f"{USER} {group} 1\n")]
        if user == 0:
            both = f"0 0 1\n{USER} {HOST_USER} 1\n"
            maps.insert(0, (both, both))
        for users, groups in maps:
            try:
                if users.count("\n") == 1:
                    write_text(f"/proc/{self._pid}/setgroups", "deny")
                write_text(f"/proc/{self._pid}/uid_map", users)
                write_text(f"/proc/{self._pid}/gid_map", groups)
            except OSError as error:
                reason = f"users cannot be mapped: {error}"
            else:
                os.write(self._ends["go"], b"G")
                return ""
        return reason

    def _watch(self) -> None:
        """Read what the program writes until it ends or breaks a limit."""
        deadline = self._began + self._limits["wall_s"]
        open_ends = {"stdout", "stderr", "status"}
        with selectors.DefaultSelector() as selector:
            for name in open_ends:
                selector.register(self._ends[name], selectors.EVENT_READ, name)
            selector.register(self._session, selectors.EVENT_READ, "session")
            while "status" in open_ends:
                left = deadline - time.monotonic()
                if left <= 0 and not self._was_starved():
                    self._stopped = "wall"
                    return
                if left <= 0:
                    left = self._limits["wall_s"]
                    deadline += left
                    if deadline > self._began + self._limits["longest_s"] + 0.001:
                        self._stopped = "busy"
                        return
                if self._uses_too_much_memory():
                    self._stopped = "memory"
                    return
                for key, _ in selector.select(min(left, MEMORY_CHECK_S)):
                    if key.data == "session":
                        # The caller asks nothing while it waits: it is gone.
                        self._stopped = "abandoned"
                        return
                    piece = os.read(key.fd, 65536)
                    if not piece:
                        selector.unregister(key.fd)
                        open_ends.discard(key.data)
                    elif not self._keep(key.data, piece):
                        self._stopped = "output"
                        return
            # The first process is gone, so all are: what they wrote waits in the pipes.
            for name in sorted(open_ends):
                while piece := os.read(self._ends[name], 65536):
                    if not self._keep(name, piece):
                        self._stopped = "output"
                        return

    def _keep(self, name: str, piece: bytes) -> bool:
        """Whether the program may go on writing."""
        if name == "status":
            self._status += piece
            return True
        kept = self._kept[name]
        kept += piece
        if name == "stdout":
            return len(kept) <= int(self._limits["output_bytes"])
        self._limits["stderr_left"] = self._limits.get("stderr_left", 2**26) - len(piece)
        del kept[:-STDERR_BYTES]
        return bool(self._limits["stderr_left"] > 0)

    def _uses_too_much_memory(self) -> bool:
        """Whether all processes together hold more than one may: each has its own limit only."""
        processes = descendants(self._pid)
        limit = int(self._limits["memory_bytes"])
        # Counts what forked processes still share for each of them; where that is too much, look.
        return own_bytes(processes) > limit and proportional_bytes(processes) > limit

    def _was_starved(self) -> bool:
        """Whether the machine, not the program, used up the time.

        The time that all of the program's processes used counts: a program that starves itself
        with its own children is not to be pitied.
        """
        used, waited, elapsed_s = 0.0, 0.0, time.monotonic() - self._began
        for pid in descendants(self._pid):
            try:
                with open(f"/proc/{pid}/schedstat", encoding="ascii") as stream:  # noqa: PTH123
                    on_cpu, waiting, _ = stream.read().split()
            except (OSError, ValueError):
                continue
            used += int(on_cpu) / 1e9
            waited = max(waited, int(waiting) / 1e9)
        return used < elapsed_s / 2 < waited

    def _kill(self) -> None:
        """End every process of the run, and wait until there is none."""
        if self._stopped or not self._job["isolated"]:
            for pid in descendants(self._pid):
                kill(pid)
        kill(self._pid)
        # What loses its parent falls to this process. A namespace dies with its first process;
        # without one, a process may have started another meanwhile.
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if self._stopped or not self._job["isolated"]:
                for pid in descendants(os.getpid())[1:]:
                    kill(pid)
