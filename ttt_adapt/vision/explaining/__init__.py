"""Look inside vision models: receptive fields, gradients of inner loops, their losses.

The names below load on first use.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".explanation": ("Explanation", "explain"),
        ".inner_loops": (
            "GradientMap",
            "InnerLosses",
            "gradient_maps",
            "inner_losses",
            "top_share",
        ),
        ".receptive_field": ("ReceptiveField", "effective_receptive_field"),
    },
)
