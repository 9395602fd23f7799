"""In which order the selected passages are learned from."""

import numpy as np

from ttt_adapt.errors import SettingsError
from ttt_adapt.types import FloatArray, IntArray


def listing_order(method: str, order: str | None) -> str:
    """In which order an adapter wants its passages.

    Learning goes by the order of picking, which for nearest neighbours is nearest first, and
    which spreads the repeats SIFT may pick: sorted by similarity they would all be learned in a
    row. A prefix takes the nearest ones that fit; fast weights take the nearest of each step and
    turn them round themselves.
    """
    if method == "in-context":
        return "nearest-first"
    if method == "fast-weights" and order in (None, "farthest-first"):
        return "nearest-first"
    return order or "as-selected"


def training_order(scores: FloatArray, order: str, seed: int) -> IntArray:
    """A permutation of a selection, by each passage's similarity to the query.

    Args:
        scores: float ``[n]`` similarities with the query, in order of picking.
        order: ``nearest-first`` (the paper's; the reverse is significantly worse),
            ``farthest-first``, ``as-selected`` (SIFT's) or ``random``. Ties: lowest position first.
        seed: of ``random`` only.

    Returns:
        int64 ``[n]`` positions in the selection, the first to learn from first.

    Raises:
        SettingsError: an unknown order, or scores that are no finite vector.

    Source: Hardt and Sun, "Test-Time Training on Nearest Neighbors for Large Language Models".
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise SettingsError(
            f"expected a vector of finite scores, found shape {values.shape} with "
            f"{int((~np.isfinite(values)).sum())} non-finite values"
        )
    if order == "nearest-first":
        found = np.argsort(-values, kind="stable")
    elif order == "farthest-first":
        found = np.argsort(values, kind="stable")
    elif order == "as-selected":
        found = np.arange(len(values))
    elif order == "random":
        found = np.random.default_rng(seed).permutation(len(values))
    else:
        raise SettingsError(
            f"expected order nearest-first, farthest-first, as-selected or random, found {order!r}"
        )
    return found.astype(np.int64)
