"""Ctrl-C that loses nothing: a run stops between two steps, not within one.

Within a step the weights of some layers are new and those of others old; what is saved then is no
state that an uninterrupted run has.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Ctrl-C once: stop after this step, and save. Twice: stop at once.

    Args:
        report: told, on the first.

    Attributes:
        asked: whether there was one.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self.asked = False
        self._report = report

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT while this lasts. Only a program's main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def ask(number: int, frame: Any) -> None:
            if self.asked or before in (signal.SIG_IGN, None):
                raise KeyboardInterrupt
            self.asked = True
            if self._report is not None:
                self._report("stopping after this step; once more stops at once")

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
