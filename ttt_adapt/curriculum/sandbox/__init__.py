"""Running programs that nobody has read: one fresh process a run, in namespaces of its own."""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.curriculum.sandbox.running import Execution, Sandbox, Session
    from ttt_adapt.curriculum.sandbox.strength import Strength

__all__ = ["Execution", "Sandbox", "Session", "Strength"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".running": ("Execution", "Sandbox", "Session"),
        ".strength": ("Strength",),
    },
)
