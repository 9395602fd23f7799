"""Running programs that nobody has read: one fresh process a run, in namespaces of its own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.curriculum.sandbox.running import Execution, Sandbox, Session
    from ttt_adapt.curriculum.sandbox.strength import Strength

_MODULE_OF = {
    "Execution": "running",
    "Sandbox": "running",
    "Session": "running",
    "Strength": "strength",
}

__all__ = ["Execution", "Sandbox", "Session", "Strength"]


def __getattr__(name: str) -> Any:
    # The launcher is started from here too, and must find its modules without anything else.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
