"""One door to every selector: by settings, for one query or many."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttt_adapt.config import SelectionSettings
from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.diversity import mmr, uncertainty
from ttt_adapt.selection.greedy import sift
from ttt_adapt.selection.lazy import sift_fast
from ttt_adapt.selection.pool import Matrix, Pool, read_pool
from ttt_adapt.selection.posterior import as_selection
from ttt_adapt.selection.relevance import nearest, nearest_distinct, random
from ttt_adapt.selection.stopping import adaptive_prefix
from ttt_adapt.selection.together import picks_together, with_query
from ttt_adapt.types import Selection


def select(
    candidates: Matrix, queries: Matrix, settings: SelectionSettings, *, seed: int = 0
) -> Selection:
    """Run the selector that ``settings`` names, then its adaptive stopping.

    Args:
        candidates: ``[K, D]``.
        queries: ``[M, D]``.
        settings: method, number of picks, λ, α and what the method needs.
        seed: of ``random``.

    Raises:
        SelectionError: input that no selector accepts.
    """
    common: dict[str, Any] = {"num_select": settings.num_select, "noise_var": settings.noise_var}
    match settings.method:
        case "sift":
            chosen = sift(candidates, queries, **common, dtype=settings.dtype)
        case "sift-fast":
            chosen = sift_fast(candidates, queries, **common)
        case "uncertainty":
            chosen = uncertainty(candidates, queries, **common)
        case "nearest":
            chosen = nearest(candidates, queries, **common)
        case "nearest-distinct":
            chosen = nearest_distinct(
                candidates, queries, **common, threshold=settings.distinct_threshold
            )
        case "mmr":
            chosen = mmr(candidates, queries, **common, relevance=settings.mmr_relevance)
        case "random":
            chosen = random(candidates, queries, **common, seed=seed)
    return chosen if settings.alpha is None else adaptive_prefix(chosen, settings.alpha)


def select_batch(
    candidates: Matrix | Sequence[Matrix],
    queries: Sequence[Matrix],
    settings: SelectionSettings,
    *,
    seeds: Sequence[int] | None = None,
) -> list[Selection]:
    """Select for many queries; equal to calling :func:`select` for each.

    Args:
        candidates: one pool ``[K, D]`` for all, or a list (or ``[B, K, D]`` array) of one a query.
        queries: B matrices ``[M, D]``; M may differ.
        settings: for all.
        seeds: one a query for ``random``; ``None``: 0 for each.

    Returns:
        one selection a query, in order. With SIFT and single-row queries over one pool in memory
        the queries go in step, a matrix product a pick for all of them.

    Raises:
        SelectionError: as :func:`select`, naming the query; or lists of unequal length.
    """
    total = len(queries)
    shared = not isinstance(candidates, (list, tuple)) and getattr(candidates, "ndim", 2) == 2
    if seeds is not None and len(seeds) != total:
        raise SelectionError(
            f"seeds: expected one for each of {total} queries, found {len(seeds)}; leave it out or "
            "give one each"
        )
    if not shared and len(candidates) != total:
        raise SelectionError(
            f"candidates: expected one pool or {total} pools, one a query, found "
            f"{len(candidates)}; repeat the pool or give it once"
        )
    if shared and settings.method == "sift" and total > 1:
        together = _sift_in_step(candidates, queries, settings)
        if together is not None:
            return together
    chosen = []
    for number in range(total):
        pool: Any = candidates if shared else candidates[number]
        try:
            chosen.append(
                select(pool, queries[number], settings, seed=seeds[number] if seeds else 0)
            )
        except SelectionError as error:
            raise SelectionError(f"query {number}: {error}") from None
    return chosen


def _sift_in_step(
    candidates: Any, queries: Sequence[Matrix], settings: SelectionSettings
) -> list[Selection] | None:
    """Selections of queries that can go in step; ``None`` where they cannot."""
    pools: list[Pool] = []
    for number, query in enumerate(queries):
        source = pools[0].candidates if pools else candidates
        try:
            pool = read_pool(
                source,
                query,
                num_select=settings.num_select,
                noise_var=settings.noise_var,
                check=False,
            )
        except SelectionError as error:
            raise SelectionError(f"query {number}: {error}") from None
        if len(pool.queries) != 1 or not isinstance(pool.candidates, np.ndarray):
            return None
        pools.append(with_query(pools[0], pool) if pools else pool)
    picks = picks_together(pools, settings.dtype)
    selections = [
        as_selection(pool, indices, "sift") for pool, indices in zip(pools, picks, strict=True)
    ]
    if settings.alpha is None:
        return selections
    return [adaptive_prefix(selection, settings.alpha) for selection in selections]
