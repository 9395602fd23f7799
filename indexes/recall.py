"""How much of the exact answer an index finds, measured on the index itself."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import SelectionError
from ttt_adapt.indexes.index import Index
from ttt_adapt.types import IntArray

_BLOCK_ROWS = 16_384
# A noisy copy's inner product with its origin is about 1/√(1+σ²): 0.83, as of close paraphrases.
_NOISE = 0.67
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class RecallReport:
    """Recall@k against an exact search.

    Attributes:
        k: neighbours asked for (fewer where the index holds fewer).
        num_queries: queries measured.
        mean: share of the k exact neighbours found, averaged over queries.
        low: lower end of the mean's 95% confidence interval (normal approximation).
        high: its upper end.
        ms_per_query: milliseconds of :meth:`Index.search` per query, passages not read.
        exact_ms_per_query: milliseconds of the exact scan, per query, all queries in one product.
    """

    k: int
    num_queries: int
    mean: float
    low: float
    high: float
    ms_per_query: float
    exact_ms_per_query: float


def measure_recall(
    index: Index,
    *,
    num_queries: int = 100,
    k: int = 50,
    seed: int = 0,
    queries_QD: NDArray[Any] | None = None,
) -> RecallReport:
    """Compare :meth:`Index.search` with a scan of all raw vectors.

    A found passage counts when it is as similar as the k-th exact neighbour, so that it does not
    matter which of several equal passages is found.

    Args:
        queries_QD: held-out queries, unit vectors ``[Q, D]``. ``None``: ``num_queries`` stored
            vectors with Gaussian noise of two thirds of their length, normalised. Those lie closer
            to the index than real queries may.

    Raises:
        SelectionError: no queries, k below 1, or queries that no search accepts.
    """
    if k < 1 or (queries_QD is None and num_queries < 1):
        raise SelectionError(f"recall needs k and num_queries ≥ 1, found {k} and {num_queries}")
    vectors_ND = index.all_vectors()
    queries = _noisy_rows(vectors_ND, num_queries, seed) if queries_QD is None else queries_QD
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    k = min(k, len(index))
    # Unmeasured: reading FAISS' file, and pages of both.
    index.search(queries[:1], num_candidates=k)
    start = time.perf_counter()
    exact_ids = exact_neighbors(vectors_ND, queries, k)
    exact_s = time.perf_counter() - start
    recalls = []
    search_s = 0.0
    for query, expected in zip(queries, exact_ids, strict=True):
        start = time.perf_counter()
        found = index.search(query[None], num_candidates=k)
        search_s += time.perf_counter() - start
        threshold = float((vectors_ND[expected] @ query).min()) - _TIE
        recalls.append(float((found.scores[:k] >= threshold).sum()) / k)
    mean = float(np.mean(recalls))
    error = 1.96 * float(np.std(recalls, ddof=1)) / len(recalls) ** 0.5 if len(recalls) > 1 else 1.0
    return RecallReport(
        k=k,
        num_queries=len(queries),
        mean=mean,
        low=max(0.0, mean - error),
        high=min(1.0, mean + error),
        ms_per_query=1000 * search_s / len(queries),
        exact_ms_per_query=1000 * exact_s / len(queries),
    )


def exact_neighbors(
    vectors_ND: NDArray[np.float32], queries_QD: NDArray[np.float32], k: int
) -> IntArray:
    """Ids ``[Q, k]`` of the largest inner products, in no order, in blocks of bounded memory."""
    num_queries = len(queries_QD)
    best_scores = np.empty((num_queries, 0), dtype=np.float32)
    best_ids = np.empty((num_queries, 0), dtype=np.int64)
    for start in range(0, len(vectors_ND), _BLOCK_ROWS):
        block = np.asarray(vectors_ND[start : start + _BLOCK_ROWS])
        scores = np.concatenate([best_scores, queries_QD @ block.T], axis=1)
        rows = np.broadcast_to(np.arange(start, start + len(block)), (num_queries, len(block)))
        ids = np.concatenate([best_ids, rows], axis=1)
        if scores.shape[1] > k:
            kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            scores = np.take_along_axis(scores, kept, axis=1)
            ids = np.take_along_axis(ids, kept, axis=1)
        best_scores, best_ids = scores, ids
    return best_ids


def _noisy_rows(
    vectors_ND: NDArray[np.float32], num_queries: int, seed: int
) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    num_vectors, dimension = vectors_ND.shape
    rows = np.array(vectors_ND[np.sort(generator.integers(num_vectors, size=num_queries))])
    noise = generator.standard_normal(rows.shape) * (_NOISE / dimension**0.5)
    queries = rows + noise
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    return np.asarray(queries, dtype=np.float32)
