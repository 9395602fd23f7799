"""One writer per index: an advisory lock that the kernel releases when its holder dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ttt_adapt.errors import BusyError
from ttt_adapt.indexes.layout import LOCK, SHARDS
from ttt_adapt.storage import TEMPORARY_MARK


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for writing; temporaries that dead writers left in it are deleted first.

    Raises:
        BusyError: another process (or thread) is writing it.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{folder}: another process is writing this index; wait for it to end, "
                "or choose another folder"
            ) from None
        # Nobody else writes here now, so every temporary is an orphan, whatever the process id
        # in its name is used for today.
        for place in (folder, folder / SHARDS):
            for path in place.glob(f"*{TEMPORARY_MARK}*"):
                path.unlink()
        yield
    finally:
        os.close(descriptor)
