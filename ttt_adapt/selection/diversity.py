"""Selectors that know diversity: uncertainty sampling (no query) and maximal marginal relevance.

Shape legend: K candidates, M query rows, D width, t picks so far.
"""

import numpy as np

from ttt_adapt.selection.pool import Matrix, read_pool
from ttt_adapt.selection.posterior import Posterior, as_selection
from ttt_adapt.selection.relevance import ROUNDING, check_fraction, row_maxima, unit_rows
from ttt_adapt.selection.ties import exact_best
from ttt_adapt.types import IntArray, Selection


def uncertainty(
    candidates: Matrix,
    queries: Matrix,
    *,
    num_select: int,
    noise_var: float = 0.01,
    allow_repeats: bool = True,
) -> Selection:
    """Pick the candidate whose own posterior variance is largest, whatever the query.

    In float64: unit vectors all start with variance one, and in float32 rounding would choose.
    Copies float32 candidates.

    Args: as :func:`~ttt_adapt.selection.sift`; the queries enter only the variance reported.

    Raises:
        SelectionError: input that no selector accepts.

    Source: uncertainty sampling as in Hübotter et al. 2024, section on baselines.
    """
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var)
    rows = pool.on_cpu().astype(np.float64, copy=False)
    variances = np.einsum("kd,kd->k", rows, rows)
    slack = ROUNDING * float(variances.max())
    posterior = Posterior(pool.queries, noise_var)

    def exact(positions: IntArray) -> np.ndarray:
        values = np.array([posterior.variance(rows[position]) for position in positions])
        return np.where(np.isin(positions, banned), -1.0, values) if banned else values

    banned: list[int] = []
    picked: list[int] = []
    total = pool.num_select if allow_repeats else min(pool.num_select, pool.num_candidates)
    while len(picked) < total:
        best = exact_best(variances, slack * (1 + len(picked)), exact)
        picked.append(best)
        posterior.pick(rows[best])
        projection = rows @ posterior.directions[-1]
        variances -= projection * projection
        if not allow_repeats:
            banned.append(best)
            variances[best] = -np.inf
    return as_selection(pool, picked, "uncertainty")


def mmr(
    candidates: Matrix,
    queries: Matrix,
    *,
    num_select: int,
    noise_var: float = 0.01,
    relevance: float = 0.7,
) -> Selection:
    """Maximal marginal relevance: relevance to the query against similarity to what is picked.

    The next pick maximises w · max_a cos(x, q_a) − (1 − w) · max_s cos(x, x_s) over candidates not
    picked yet; at most K are picked. Ties go to the lowest position. Copies the candidates.

    Args:
        relevance: w, 0 to 1. Other arguments as :func:`~ttt_adapt.selection.nearest`.

    Raises:
        SelectionError: input that no selector accepts.

    Source: Carbonell, Goldstein, "The Use of MMR" (SIGIR 1998), equation 1, with cosines.
    """
    check_fraction(relevance, "relevance", "the usual choice is 0.5 to 0.8")
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var)
    rows = unit_rows(pool.on_cpu().astype(np.float64))
    wanted = unit_rows(pool.queries)
    relevances = (rows @ wanted.T).max(axis=1)
    redundancies = np.full(len(rows), -np.inf)
    weight = float(relevance)
    picked: list[int] = []

    def exact(positions: IntArray) -> np.ndarray:
        scores = weight * row_maxima(rows[positions], wanted)
        if picked:
            scores -= (1.0 - weight) * row_maxima(rows[positions], rows[picked])
        scores[np.isin(positions, picked)] = -np.inf
        return scores

    while len(picked) < min(pool.num_select, len(rows)):
        scores = weight * relevances
        if picked:
            np.maximum(redundancies, rows @ rows[picked[-1]], out=redundancies)
            scores -= (1.0 - weight) * redundancies
        scores[picked] = -np.inf
        picked.append(exact_best(scores, ROUNDING, exact))
    return as_selection(pool, picked, "mmr")
