"""Kernel calls that no honest program needs, refused: memory outside every limit, parts of the
kernel that have had holes, and namespaces of one's own.

A second line behind the namespaces: on processors that are not listed there is none. Standard
library only.
"""

import ctypes
import errno
import platform
import struct

from ttt_adapt.curriculum.sandbox import syscalls

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000

# Of the same number everywhere: pidfd_open to mount_setattr (Linux 5.1 and later).
_NEWER = {
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsmount": 432,
    "mount_setattr": 442,
    "memfd_secret": 447,
}
CLONE3 = 435
REFUSED = {
    "x86_64": _NEWER
    | {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "ptrace": 101,
        "pivot_root": 155,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "reboot": 169,
        "init_module": 175,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "open_by_handle_at": 304,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "finit_module": 313,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": _NEWER
    | {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "ptrace": 117,
        "reboot": 142,
        "msgget": 186,
        "semget": 190,
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "perf_event_open": 241,
        "open_by_handle_at": 265,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "finit_module": 273,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
    },
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000


def refuse_calls() -> bool:
    """Install the filter for this process and all it starts; whether there is one for this machine.

    Needs :data:`syscalls.PR_SET_NO_NEW_PRIVS`.
    """
    machine = platform.machine()
    if machine not in REFUSED:
        return False
    program = b"".join(_instructions(machine))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    syscalls.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(buffer))
    return True


def _instructions(machine: str) -> list[bytes]:
    refuse = _return(_ERRNO | errno.EPERM)
    found = [
        _instruction(_LOAD, _ARCHITECTURE),
        # Another architecture's calls have other numbers.
        _instruction(_EQUAL, _AUDIT[machine], skip_if=1),
        _return(_ERRNO | errno.ENOSYS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, skip_unless=1),
        _return(_ERRNO | errno.ENOSYS),
        # Its arguments lie in memory, which a filter cannot read; the C library falls back to clone.
        _instruction(_EQUAL, CLONE3, skip_unless=1),
        _return(_ERRNO | errno.ENOSYS),
    ]
    for number in sorted(REFUSED[machine].values()):
        found += [_instruction(_EQUAL, number, skip_unless=1), refuse]
    return [
        *found,
        _instruction(_EQUAL, _CLONE[machine], skip_unless=3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, skip_unless=1),
        refuse,
        _return(_ALLOW),
    ]


def _instruction(code: int, value: int, skip_if: int = 0, skip_unless: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_unless, value)


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value)
