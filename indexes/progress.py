"""What a build tells whoever watches it, and the clock of its stages."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

STAGES = ("embed", "train", "add", "write")


def _ignore_stage(stage: str, total: int | None) -> None:
    pass


def _ignore_count(count: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Callbacks of a build; each may be left out.

    Attributes:
        on_stage: called as a stage begins with its name (``embed``, ``train``, ``add``,
            ``write``) and how many passages it will handle; ``None`` where nobody knows yet.
        on_advance: passages finished since the last call: newly embedded in ``embed``, added to
            FAISS in ``add``.
        on_resumed: passages found already embedded by an earlier, interrupted build.
    """

    on_stage: Callable[[str, int | None], None] = _ignore_stage
    on_advance: Callable[[int], None] = _ignore_count
    on_resumed: Callable[[int], None] = _ignore_count


class StageClock:
    """Seconds by name, summed over visits."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
