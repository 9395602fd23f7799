"""A root of its own for one run: the interpreter, read-only, and an empty folder to write in.

What is not listed is not there: no home, no working folder, no data of the host. Standard library
only; runs as the first process of new user, mount and process namespaces.
"""

import os
import re
from typing import Any

from ttt_adapt.curriculum.sandbox import syscalls

DEVICES = ("null", "zero", "full", "random", "urandom")
FILES = {
    "etc/passwd": "user:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "user:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}
WRITABLE = "/tmp"
_KEPT_FLAGS = {
    "noexec": syscalls.MS_NOEXEC,
    "noatime": syscalls.MS_NOATIME,
    "nodiratime": syscalls.MS_NODIRATIME,
    "relatime": syscalls.MS_RELATIME,
}


def enter(plan: dict[str, Any]) -> None:
    """Build the root that ``plan`` describes and move into it; there is no way back.

    Args:
        plan: ``binds`` (folders and files of the host, seen at the same or another path),
            ``links`` (symbolic ones), ``mount_point`` (any folder: it is hidden for this process
            alone), ``tmp_bytes``.

    Raises:
        OSError: the kernel refuses a step; the message names it.
    """
    # Opened before anything is hidden; a mount takes them by descriptor.
    sources = [(os.open(source, os.O_PATH), target) for source, target in plan["binds"]]
    devices = [(os.open(f"/dev/{name}", os.O_PATH), f"/dev/{name}") for name in DEVICES]
    base = plan["mount_point"]
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmpfs", base, "tmpfs", flags, "mode=755,size=4m")
    for descriptor, target in sources + devices:
        _bind(descriptor, base + target)
    _make_read_only(base)
    for name, target in plan["links"]:
        os.makedirs(os.path.dirname(base + name), exist_ok=True)  # noqa: PTH103, PTH120
        os.symlink(target, base + name)  # noqa: PTH211 - pathlib is not loaded here
    os.makedirs(f"{base}/etc", exist_ok=True)  # noqa: PTH103
    for name, text in FILES.items():
        with open(f"{base}/{name}", "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(text)
    for name in ("in", "out", "err"):
        os.symlink(f"/proc/self/fd/{('in', 'out', 'err').index(name)}", f"{base}/dev/std{name}")  # noqa: PTH211
    os.symlink("/proc/self/fd", f"{base}/dev/fd")  # noqa: PTH211
    size = f"mode=1777,size={plan['tmp_bytes']},nr_inodes=16384"
    for folder in (WRITABLE, "/dev/shm"):
        os.makedirs(base + folder, exist_ok=True)  # noqa: PTH103
        syscalls.mount("tmpfs", base + folder, "tmpfs", flags, size)
    # While the host's /proc can still be seen: without one the kernel grants no new one.
    os.mkdir(f"{base}/proc")  # noqa: PTH102
    _mount_proc(f"{base}/proc")
    os.chdir(base)
    syscalls.pivot_root(".", ".")
    syscalls.detach(".")
    os.chdir("/")
    read_only = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY
    syscalls.mount("none", "/", None, flags | read_only)


def _bind(descriptor: int, target: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):  # noqa: PTH112
        os.makedirs(target, exist_ok=True)  # noqa: PTH103
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
    os.close(descriptor)


def _make_read_only(base: str) -> None:
    """Every mount below ``base``, those that came along with a bound folder too."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
        lines = stream.read().splitlines()
    for line in lines:
        fields = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if not place.startswith(f"{base}/") or place.startswith(f"{base}/dev/"):
            continue
        kept = 0
        for option in fields[5].split(","):
            # A user namespace may not take these from what it inherits.
            kept |= _KEPT_FLAGS.get(option, 0)
        flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
        remount = syscalls.MS_BIND | syscalls.MS_REMOUNT
        syscalls.mount("none", place, None, remount | flags | kept)


def _mount_proc(target: str) -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    try:
        syscalls.mount("proc", target, "proc", flags, "subset=pid")
    except OSError:
        # Kernels before 5.8 know no subsets.
        syscalls.mount("proc", target, "proc", flags)
