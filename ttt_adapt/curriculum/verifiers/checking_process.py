"""Asking the checking process, and killing it when it does not answer."""

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
from typing import Any

from ttt_adapt.curriculum.sandbox import frames

START_S = 120.0
"""For a process to start and load what it compares with, on a busy machine."""
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1])\n"
    "from ttt_adapt.curriculum.verifiers.checking import main\n"
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)


class CheckFailed(Exception):
    """The process did not answer in time, or died; it says nothing of what was to be checked."""


class LoadFailed(Exception):
    """What is to compare cannot be loaded; the message says why."""


class CheckingProcesses:
    """Processes that compare answers, as many as are asked at once; started when needed.

    Args:
        timeout_s: for one request, after which its process is killed.
        memory_mb: address space of a process.
    """

    def __init__(self, timeout_s: float, memory_mb: int) -> None:
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all: set[_Process] = set()
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            CheckFailed: there was none.
            LoadFailed: what it asks for cannot be imported.
        """
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process(self._memory_mb)
            with self._lock:
                self._all.add(process)
        try:
            reply = process.ask(request, self._timeout_s)
        except BaseException:
            process.kill()
            with self._lock:
                self._all.discard(process)
            raise
        self._idle.put(process)
        return reply

    def close(self) -> None:
        """End every process."""
        with self._lock:
            for process in self._all:
                process.kill()
            self._all.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait()


class _Process:
    def __init__(self, memory_mb: int) -> None:
        self._channel, theirs = socket.socketpair()
        arguments = (json.dumps(sys.path), str(theirs.fileno()), str(memory_mb * 2**20))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            # Ctrl-C is for the process that verifies; this one ends with it.
            start_new_session=True,
        )
        theirs.close()
        self._loaded: set[tuple[str, str]] = set()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        # What is loaded once is not the completion's fault.
        place = (request["do"], request.get("callable", ""))
        if place not in self._loaded:
            reply = self._exchange({"do": "load", "of": place[0], "callable": place[1]}, START_S)
            if "error" in reply:
                raise LoadFailed(reply["error"])
            self._loaded.add(place)
        return self._exchange(request, timeout_s)

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._channel.settimeout(timeout_s)
        try:
            frames.send(self._channel, request)
            reply = frames.receive(self._channel)
        except TimeoutError:
            message = f"no answer within {timeout_s:g} s; its process was killed"
            raise CheckFailed(message) from None
        except (OSError, frames.BadFrame) as error:
            raise CheckFailed(f"its process failed: {error}") from None
        if not isinstance(reply, dict):
            raise CheckFailed("its process died")
        return reply

    def kill(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()
