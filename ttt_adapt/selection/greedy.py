"""SIFT, exact: at each pick the candidate that lowers the query rows' total variance most.

Source: Hübotter, Bongni, Hakimi, Krause, "Efficiently Learning at Test-Time: Active Fine-Tuning of
LLMs" (2024), eq. for SIFT(λ); the feature-space form is derived in this folder's README.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.pool import (
    Float64Array,
    Matrix,
    Pool,
    Precision,
    read_pool,
    unusable_values,
)
from ttt_adapt.selection.posterior import as_selection
from ttt_adapt.selection.screening import Screen, numpy_screen, resolves
from ttt_adapt.selection.stopping import adaptive_prefix
from ttt_adapt.selection.ties import Arbiter, Doubt
from ttt_adapt.types import Selection

Progress = Callable[[int], None]


def sift(
    candidates: Matrix,
    queries: Matrix,
    *,
    num_select: int,
    noise_var: float = 0.01,
    alpha: float | None = None,
    dtype: Precision | None = None,
    allow_repeats: bool = True,
    progress: Progress | None = None,
) -> Selection:
    """Pick candidates greedily by how much they tell about the query rows.

    Args:
        candidates: ``[K, D]``, float32 or float64, numpy array or torch tensor on any device; need
            not be unit vectors. Not copied unless its type differs from ``dtype``.
        queries: ``[M, D]``; the objective is summed over rows.
        num_select: N, may exceed K and D.
        noise_var: λ; small values spend picks on diversity, large ones on relevance.
        alpha: adaptive stopping, see :func:`~ttt_adapt.selection.adaptive_prefix`.
        dtype: of the pass over the candidates; ``None``: float64 for float64 candidates, else
            float32. Picks agree either way: doubts are settled in float64. With λ below 1e-3 of the
            largest ‖x‖² the pass is in float64 always, below 1e-8 there is none and the cost is
            O(K·t·D) for pick t.
        allow_repeats: whether a candidate may be picked again, as in the paper. Otherwise at most
            K are picked.
        progress: receives the number of picks just made, after each.

    Returns:
        the picks and the exact (float64) posterior variance after each. Ties go to the lowest
        position.

    Raises:
        SelectionError: input that no selector accepts.
    """
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var, check=False)
    selection = as_selection(pool, greedy_picks(pool, dtype, allow_repeats, progress), "sift")
    return selection if alpha is None else adaptive_prefix(selection, alpha)


def greedy_picks(
    pool: Pool,
    dtype: Precision | None,
    allow_repeats: bool = True,
    progress: Progress | None = None,
) -> list[int]:
    """Positions of the greedy picks, in order."""
    precision = asked_precision(pool, dtype)
    num_select = pool.num_select
    if not allow_repeats:
        num_select = min(num_select, pool.num_candidates)
    screen = make_screen(pool, precision, num_select)
    if precision == "float32" and not resolves(precision, pool.noise_var, screen.max_norm2):
        precision = "float64"
        screen = make_screen(pool, precision, num_select)
    if not screen.max_norm2 < float("inf"):
        raise unusable_values(pool.on_cpu(), "candidates")
    if pool.prior_var == 0.0:
        # Nothing to learn about: every candidate ties at every pick.
        if progress is not None:
            progress(num_select)
        return [0] * num_select if allow_repeats else list(range(num_select))
    width = pool.candidates.shape[1]
    doubt = Doubt(precision, width, pool.prior_var, screen.max_norm2, pool.noise_var)
    arbiter = Arbiter(dataclasses.replace(pool, queries=reduced_rows(pool.queries)))
    picked: list[int] = []
    if not resolves(precision, pool.noise_var, screen.max_norm2):
        return slow_picks(arbiter, pool.num_candidates, num_select, allow_repeats, progress)
    for remaining in range(num_select - 1, -1, -1):
        position, score, ratio, second = screen.leader()
        limit = doubt.limit(score, ratio)
        if second >= 0.0 and second**0.5 >= limit:
            position = settle(screen, doubt, limit, arbiter, picked)
            ratio = screen.ratio(position)
        picked.append(position)
        if progress is not None:
            progress(1)
        if remaining:
            doubt.grow(score, ratio)
            screen.pick(position)
            if not allow_repeats:
                screen.ban(position)
    return picked


def slow_picks(
    arbiter: Arbiter,
    num_candidates: int,
    num_select: int,
    allow_repeats: bool,
    progress: Progress | None = None,
) -> list[int]:
    """Greedy picks where λ is below what any fast pass resolves: every candidate is in question."""
    left = np.arange(num_candidates)
    picked: list[int] = []
    while len(picked) < num_select:
        picked.append(arbiter.best(picked, left))
        if progress is not None:
            progress(1)
        if not allow_repeats:
            left = left[left != picked[-1]]
    return picked


def settle(screen: Screen, doubt: Doubt, limit: float, arbiter: Arbiter, picked: list[int]) -> int:
    """The best candidate where rounding leaves more than one in question."""
    positions, scores, noisy, norms2 = screen.above(limit * limit if limit > 0.0 else 0.0)
    left = positions[doubt.contenders(scores, noisy, norms2, doubt.unit)]
    return int(left[0]) if len(left) == 1 else arbiter.best(picked, left)


def asked_precision(pool: Pool, dtype: Precision | None) -> Precision:
    """The precision of the fast pass that the caller asked for."""
    if dtype is None:
        return "float64" if str(pool.candidates.dtype).endswith("float64") else "float32"
    if dtype not in ("float32", "float64"):
        raise SelectionError(
            f"dtype: expected 'float32' or 'float64', found {dtype!r}; leave it out to keep the "
            "candidates' own"
        )
    return dtype


def make_screen(pool: Pool, precision: Precision, num_select: int) -> Screen:
    """The fast pass for a pool where it lives."""
    queries = reduced_rows(pool.queries)
    if pool.on_accelerator:
        import torch

        from ttt_adapt.selection.accelerator import TensorScreen

        tensor = pool.candidates.to(getattr(torch, precision))
        return TensorScreen(tensor, queries, pool.noise_var, num_select)
    array: Any = pool.candidates.astype(precision, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return numpy_screen(array, queries, pool.noise_var, num_select)


def reduced_rows(queries_MD: Float64Array) -> Float64Array:
    """At most D rows with the same QᵀQ, on which alone the objective depends."""
    num_rows, width = queries_MD.shape
    if num_rows <= width:
        return queries_MD
    return np.asarray(np.linalg.qr(queries_MD, mode="r"))
