"""Look inside vision models: receptive fields, gradients of inner loops, their losses.

The names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.vision.explaining.explanation import Explanation, explain
    from ttt_adapt.vision.explaining.inner_loops import (
        GradientMap,
        InnerLosses,
        gradient_maps,
        inner_losses,
        top_share,
    )
    from ttt_adapt.vision.explaining.receptive_field import (
        ReceptiveField,
        effective_receptive_field,
    )

_MODULE_OF = {
    "Explanation": "explanation",
    "GradientMap": "inner_loops",
    "InnerLosses": "inner_loops",
    "ReceptiveField": "receptive_field",
    "effective_receptive_field": "receptive_field",
    "explain": "explanation",
    "gradient_maps": "inner_loops",
    "inner_losses": "inner_loops",
    "top_share": "inner_loops",
}

__all__ = [
    "Explanation",
    "GradientMap",
    "InnerLosses",
    "ReceptiveField",
    "effective_receptive_field",
    "explain",
    "gradient_maps",
    "inner_losses",
    "top_share",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
