"""Adaptive stopping: learn from fewer passages where they tell less."""

import dataclasses

import numpy as np

from ttt_adapt.errors import SelectionError
from ttt_adapt.types import Selection


def adaptive_prefix(selection: Selection, alpha: float) -> Selection:
    """Keep picks while σ_n ≤ 1/(α n).

    σ_n = √(posterior_var_n / prior_var): the root of the mean variance over query rows, relative to
    before any pick; for one unit query row it is the standard deviation of the paper. n counts from
    1. The rule is a prefix rule: everything from the first violation on is dropped, also picks that
    would satisfy it again. The first pick is always kept, so that there is something to learn
    from. Applying it again changes nothing.

    Args:
        selection: of any method.
        alpha: α; larger stops earlier. The paper tried 0.15 to 0.5.

    Raises:
        SelectionError: α is not a positive finite number.

    Source: Hübotter et al. 2024, adaptive SIFT ("stop once σ_n exceeds (α n)⁻¹").
    """
    if not isinstance(alpha, (int, float, np.floating, np.integer)) or not 0 < alpha < np.inf:
        raise SelectionError(
            f"alpha: expected a positive finite number, found {alpha!r}; "
            "try 0.15 to 0.5, or None to keep every pick"
        )
    total = len(selection.indices)
    counts = np.arange(1, total + 1)
    relative = selection.posterior_var / (selection.prior_var or 1.0)
    stop = np.sqrt(relative) * float(alpha) * counts > 1.0
    keep = max(1, int(stop.argmax())) if stop.any() else total
    if keep >= total:
        return selection
    return dataclasses.replace(
        selection,
        indices=selection.indices[:keep],
        posterior_var=selection.posterior_var[:keep],
        gains=selection.gains[:keep],
    )
