"""SIFT-Fast: greedy selection that trusts old scores as upper bounds. An approximation."""

import heapq

import numpy as np

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.pool import Matrix, float64_blocks, read_pool
from ttt_adapt.selection.posterior import Posterior, as_selection
from ttt_adapt.types import Selection

# First scores come from matrix products, whose rounding depends on the position; raised by this
# they stay above the exact ones, so that equal rows meet with equal, exact scores.
_HEADROOM = 1.0 + 1e-9


def sift_fast(
    candidates: Matrix,
    queries: Matrix,
    *,
    num_select: int,
    noise_var: float = 0.01,
    allow_repeats: bool = True,
) -> Selection:
    """Pick by a priority queue of scores, recomputed only when they reach its top.

    A candidate's score is taken as an upper bound of its later scores. That holds only where
    candidates do not complement each other; where they do, picks differ from
    :func:`~ttt_adapt.selection.sift`, which is why the result is marked ``approximate`` and
    :func:`greedy_gap` exists. In float64 throughout. Cost: one pass over the candidates, then
    O(t·D) a recomputation.

    Args: as :func:`~ttt_adapt.selection.sift`.

    Raises:
        SelectionError: input that no selector accepts.

    Source: Hübotter et al. 2024, appendix F.2 (SIFT-Fast). First scores use every query row, not
    their mean.
    """
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var)
    array = pool.on_cpu()
    posterior = Posterior(pool.queries, noise_var)
    parts = [posterior.gains(rows)[0] for _, rows in float64_blocks(array)]
    first = np.concatenate(parts) * _HEADROOM
    queue = [(-score, position) for position, score in enumerate(first.tolist())]
    heapq.heapify(queue)
    total = pool.num_select if allow_repeats else min(pool.num_select, pool.num_candidates)
    picked: list[int] = []
    while len(picked) < total:
        position = heapq.heappop(queue)[1]
        entry = (-posterior.gain(array[position]), position)
        if queue and entry > queue[0]:
            heapq.heappush(queue, entry)
            continue
        picked.append(position)
        posterior.pick(array[position])
        if allow_repeats:
            heapq.heappush(queue, entry)
    return as_selection(pool, picked, "sift-fast", approximate=True)


def greedy_gap(fast: Selection, exact: Selection) -> float:
    """Final posterior variance of an approximate selection over that of the exact greedy one.

    1.0 means as good; 1.2 that 20 % more variance is left. Below 1.0 the approximation was lucky:
    greedy is not optimal.

    Raises:
        SelectionError: the two are of different length or of different queries.
    """
    if len(fast.indices) != len(exact.indices) or not np.isclose(fast.prior_var, exact.prior_var):
        raise SelectionError(
            f"greedy_gap: expected two selections for the same queries and number of picks, found "
            f"{len(fast.indices)} picks from prior variance {fast.prior_var:.6g} and "
            f"{len(exact.indices)} from {exact.prior_var:.6g}; select with equal settings"
        )
    left = float(exact.posterior_var[-1])
    return float(fast.posterior_var[-1]) / left if left > 0.0 else 1.0
