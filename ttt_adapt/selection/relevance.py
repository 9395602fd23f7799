"""Selectors by similarity: nearest, nearest without near-duplicates, and random as their control.

Shape legend: K candidates, M query rows, D width, n rows, t picks so far.
"""

import numpy as np

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.pool import Float64Array, Matrix, Pool, float64_blocks, read_pool
from ttt_adapt.selection.posterior import as_selection
from ttt_adapt.types import IntArray, Selection

# Rounding of a float64 inner product, as a share of ‖x‖‖q‖.
ROUNDING = 1e-13


def nearest(
    candidates: Matrix, queries: Matrix, *, num_select: int, noise_var: float = 0.01
) -> Selection:
    """The candidates of largest inner product with any query row, nearest first.

    As an index ranks them, repeated passages included. At most K are picked. Ties go to the lowest
    position.

    Args:
        candidates: ``[K, D]``.
        queries: ``[M, D]``.
        num_select: N.
        noise_var: λ, of the posterior variance that is reported; picks do not depend on it.

    Raises:
        SelectionError: input that no selector accepts.
    """
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var)
    return as_selection(pool, by_relevance(pool)[: pool.num_select], "nearest")


def nearest_distinct(
    candidates: Matrix,
    queries: Matrix,
    *,
    num_select: int,
    noise_var: float = 0.01,
    threshold: float = 0.95,
) -> Selection:
    """As :func:`nearest`, leaving out candidates too similar to one already picked.

    Args:
        threshold: cosine similarity above which a candidate counts as a duplicate, 0 to 1; 1.0
            leaves none out. Other arguments as :func:`nearest`.

    Returns:
        fewer than ``num_select`` picks where the pool has fewer distinct candidates; at least one.

    Raises:
        SelectionError: input that no selector accepts.
    """
    check_fraction(threshold, "threshold", "1.0 keeps every candidate")
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var)
    picked: list[int] = []
    directions = np.empty((min(pool.num_select, pool.num_candidates), pool.queries.shape[1]))
    order = by_relevance(pool)
    for start in range(0, len(order), 256):
        block = order[start : start + 256]
        for position, row in zip(block.tolist(), unit_rows(pool.rows(block)), strict=True):
            kept = directions[: len(picked)]
            if picked and min(1.0, float((kept @ row).max())) > threshold:
                continue
            directions[len(picked)] = row
            picked.append(position)
            if len(picked) == pool.num_select:
                return as_selection(pool, picked, "nearest-distinct")
    return as_selection(pool, picked, "nearest-distinct")


def random(
    candidates: Matrix,
    queries: Matrix,
    *,
    num_select: int,
    noise_var: float = 0.01,
    seed: int = 0,
) -> Selection:
    """Candidates drawn uniformly without replacement; at most K.

    Args:
        seed: equal seeds draw equal positions. Other arguments as :func:`nearest`.

    Raises:
        SelectionError: input that no selector accepts.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SelectionError(
            f"seed: expected a whole number of at least 0, found {seed!r}; give one, e.g. 0"
        )
    pool = read_pool(candidates, queries, num_select=num_select, noise_var=noise_var)
    order = np.random.default_rng(int(seed)).permutation(pool.num_candidates)
    return as_selection(pool, order[: pool.num_select], "random")


def by_relevance(pool: Pool) -> IntArray:
    """All positions by falling relevance, ties by lowest position.

    Products of matrices round differently at different positions, so near-equal neighbours in the
    ranking are computed again, each from its own row alone.
    """
    array = pool.on_cpu()
    relevance = np.empty(pool.num_candidates)
    largest = 0.0
    for start, rows in float64_blocks(array):
        relevance[start : start + len(rows)] = (rows @ pool.queries.T).max(axis=1)
        largest = max(largest, float(np.einsum("nd,nd->n", rows, rows).max()))
    slack = ROUNDING * (largest * pool.prior_var) ** 0.5
    order = np.argsort(-relevance, kind="stable")
    close = -np.diff(relevance[order]) <= 2.0 * slack
    if close.any():
        doubtful = np.zeros(len(order), dtype=bool)
        doubtful[order[:-1][close]] = True
        doubtful[order[1:][close]] = True
        positions = np.flatnonzero(doubtful)
        for start in range(0, len(positions), 256):
            some = positions[start : start + 256]
            relevance[some] = row_maxima(pool.rows(some), pool.queries)
        order = np.argsort(-relevance, kind="stable")
    return order.astype(np.int64, copy=False)


def row_maxima(rows_nD: Float64Array, others_mD: Float64Array) -> Float64Array:
    """Each row's largest inner product with ``others``, as a function of that row alone."""
    products = np.einsum("nd,md->nm", rows_nD, others_mD)
    return np.asarray(products.max(axis=1), dtype=np.float64)


def unit_rows(rows_nD: Float64Array) -> Float64Array:
    """Rows divided by their length; a zero row stays zero."""
    lengths = np.sqrt(np.einsum("nd,nd->n", rows_nD, rows_nD))
    lengths[lengths == 0.0] = 1.0
    return np.asarray(rows_nD / lengths[:, None])


def check_fraction(value: float, name: str, remedy: str) -> None:
    """Refuse what is not between 0 and 1."""
    if not isinstance(value, (int, float, np.floating)) or not 0.0 <= value <= 1.0:
        raise SelectionError(f"{name}: expected a number from 0 to 1, found {value!r}; {remedy}")
