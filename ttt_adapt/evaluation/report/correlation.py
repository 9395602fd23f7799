"""Rank correlation."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's ρ: the correlation of average ranks; NaN for fewer than 3 or constant values."""
    if len(first) < 3:
        return float("nan")
    ranks = [_average_ranks(values) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    scale = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum() / scale) if scale else float("nan")


def _average_ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2.0)[inverse]
    return ranks
