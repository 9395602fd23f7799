"""From a forked process to a program: namespaces, the private root, limits, no privileges.

Three processes, each the parent of the next: the outer one enters new namespaces, the first one of
the namespace builds the root and reaps, the program runs. None of these functions returns to its
caller. Standard library only.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from ttt_adapt.curriculum.sandbox import private_root, program, seccomp, syscalls
from ttt_adapt.curriculum.sandbox.processes import descendants, kill, write_text

USER = 1000
"""The program's user and group, inside."""
CHANNEL = 3
"""The program's descriptor of the socket that it is asked over; nothing where it is asked nothing."""
STACK_BYTES = 64 * 2**20
_HIGH = 200
NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)


def enter(job: dict[str, Any], ends: dict[str, int]) -> None:
    """The run's outer process: new namespaces, then their first process. Never returns."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if job["isolated"]:
            syscalls.unshare(NAMESPACES)
            os.write(ends["status"], b"U")
            if os.read(ends["go"], 1) != b"G":
                os._exit(1)
        first = os.fork()
        if first == 0:
            _first_process(job, ends)
        # The launcher waits for the status pipe to close: only the first process may hold it.
        for end in ends.values():
            if end >= 0:
                os.close(end)
        os.waitpid(first, 0)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a forked process must not go on
        _fault(ends["status"], error)


def _first_process(job: dict[str, Any], ends: dict[str, int]) -> None:
    """Build the root, start the program, reap whatever there is to reap, report. Never returns."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        if job["isolated"]:
            _no_further_namespaces()
            private_root.enter(job["root"])
            socket.sethostname("sandbox")
        else:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        child = os.fork()
        if child == 0:
            _program(job, ends)
        for name, end in ends.items():
            if end >= 0 and name != "status":
                os.close(end)
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == child:
                break
        cpu_s = usage.ru_utime + usage.ru_stime
        ended = os.waitstatus_to_exitcode(status)
        report = {"cpu_s": cpu_s, "exit": ended if ended >= 0 else None, "signal": max(0, -ended)}
        if job["isolated"]:
            os.write(ends["status"], b"\n" + json.dumps(report).encode())
            os._exit(0)
        # No namespace dies with this process: what is left is ended one by one, then all told.
        for other in descendants(os.getpid())[1:]:
            kill(other)
        os.write(ends["status"], b"\n" + json.dumps(report).encode())
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a forked process must not go on
        _fault(ends["status"], error)


def _program(job: dict[str, Any], ends: dict[str, int]) -> None:
    """Become the program: limits, no privileges, no descriptors but its own. Never returns."""
    status = ends["status"]
    try:
        stdin = os.memfd_create("stdin")
        _write_all(stdin, job["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.dup2(ends["stdout"], 1)
        os.dup2(ends["stderr"], 2)
        # First above what they are moved to, so that neither overwrites the other.
        status = os.dup2(ends["status"], _HIGH)
        channel = os.dup2(ends["channel"], _HIGH + 1) if ends["channel"] >= 0 else os.dup(0)
        os.dup2(channel, CHANNEL)
        status = os.dup2(status, CHANNEL + 1)
        os.closerange(CHANNEL + 2, 4096)
        _set_limits(job["limits"])
        os.chdir(private_root.WRITABLE if job["isolated"] else job["folder"])
        # As long as it is allowed to, which a change of user ends.
        syscalls.bound_capabilities()
        if job["isolated"] and os.geteuid() != USER:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        syscalls.drop_capabilities()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.refuse_calls()
        # Both are reset where a process changes its user.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        os.umask(0o022)
        os.close(status)
    except BaseException as error:  # noqa: BLE001 - a forked process must not go on
        _fault(status, error)
    code = 120
    try:
        code = _become(job)
    except BaseException:  # noqa: BLE001 - a forked process must not go on
        _write_all(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _become(job: dict[str, Any]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python starts with
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program.environment() | job["environment"])
    sys.argv = ["program.py"]
    sys.orig_argv = [sys.executable, "program.py"]
    sys.path[:] = ["", *job["sys_path"]]
    program.open_standard_streams()
    for name in [name for name in sys.modules if name.partition(".")[0] == "ttt_adapt"]:
        del sys.modules[name]
    mode, task = job["mode"], job["task"]
    job.clear()
    if mode == "run":
        return program.run(task["sources"])
    if mode == "serve":
        return program.serve(task["sources"], CHANNEL)
    return program.check(task["prelude"], task["code"], task["functions"], CHANNEL)


def _set_limits(limits: dict[str, Any]) -> None:
    _limit(resource.RLIMIT_CPU, int(limits["cpu_s"] + 0.999))
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, limits["num_files"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    if limits["num_processes"]:
        _limit(resource.RLIMIT_NPROC, limits["num_processes"])
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, soft))


def _limit(kind: int, value: int) -> None:
    highest = resource.getrlimit(kind)[1]
    if highest != resource.RLIM_INFINITY:
        value = min(value, highest)
    resource.setrlimit(kind, (value, value))


def _no_further_namespaces() -> None:
    """A namespace of its own would give the program privileges over parts of the kernel again."""
    for kind in ("user", "mnt", "net", "pid"):
        with contextlib.suppress(OSError):
            write_text(f"/proc/sys/user/max_{kind}_namespaces", "0")


def _fault(status: int, error: BaseException) -> None:
    try:
        os.write(status, b"\n" + json.dumps({"fault": str(error)[:500]}).encode())
    finally:
        os._exit(1)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
