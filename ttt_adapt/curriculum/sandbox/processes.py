"""Looking at processes through /proc, and ending them. Standard library only."""

import contextlib
import os
import signal


def descendants(pid: int) -> list[int]:
    """A process and all below it, the process first."""
    found = [pid]
    for known in found:
        try:
            for thread in os.listdir(f"/proc/{known}/task"):  # noqa: PTH208
                with open(f"/proc/{known}/task/{thread}/children", "rb") as stream:  # noqa: PTH123
                    found += [int(child) for child in stream.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile; its children are its parent's now
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def oom_kills() -> int:
    try:
        with open("/proc/vmstat", encoding="ascii") as stream:  # noqa: PTH123
            return next(int(line.split()[1]) for line in stream if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):
        return 0


def write_text(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def own_bytes(processes: list[int]) -> int:
    """Memory that these processes hold and do not share by mapping the same file."""
    pages = 0
    for pid in processes:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as stream:  # noqa: PTH123
            _, resident, shared, *_ = stream.read().split()
            pages += int(resident) - int(shared)
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(processes: list[int]) -> int:
    """Memory that these processes hold, what several share counted once; slower to find out."""
    total = 0
    for pid in processes:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as stream:  # noqa: PTH123
                total += sum(int(line.split()[1]) for line in stream if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return own_bytes(processes)
    return total * 1024
