"""From FAISS' proposals to exact, accepted candidates of one query row.

Shape legend: N passages, K candidates, M query rows, D embedding width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import SelectionError
from ttt_adapt.indexes.passage_store import PassageStore
from ttt_adapt.types import FloatArray, IntArray, Passage

Reject = Callable[[Passage], str]
Propose = Callable[[int, int | None], IntArray]
"""(how many, inverted lists to visit) → that many ids, or fewer; −1 where FAISS padded."""

# Proposals beyond K: room for a few rejections and for ties at the cut.
SLACK = 32
# Compressed codes rank roughly: more proposals for the raw vectors to put in order.
_OVERSAMPLING = 4
# FAISS sums inner products of unit vectors in float32; two scores this close may be a tie.
_TIE = 1e-6
_BLOCK_ROWS = 4096


@dataclass(slots=True)
class Verdicts:
    """What ``reject`` said about each passage, asked once; passages are read in blocks."""

    store: PassageStore
    reject: Reject | None
    reasons: dict[int, str] = field(default_factory=dict)

    def of(self, ids: list[int]) -> Iterator[tuple[int, str]]:
        """Each id with the reason it is left out; empty: accepted. Lazy."""
        for row in ids:
            if self.reject is None:
                yield row, ""
                continue
            if row not in self.reasons:
                reason = self.reject(self.store.passages([row])[0])
                if reason not in ("", "own", "overlap"):
                    raise SelectionError(
                        f"reject must return '', 'own' or 'overlap', found {reason!r}"
                    )
                self.reasons[row] = reason
            yield row, self.reasons[row]


@dataclass(slots=True)
class Accepted:
    """One query row's outcome: accepted ids, most similar first, and the ids left out on the way."""

    ids: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)


def exact_scores(vectors_KD: FloatArray, query_D: FloatArray) -> NDArray[np.float32]:
    """Inner products ``[K]``, summed in float64: equal vectors get equal scores.

    No matrix product, whose rounding may depend on a row's position.
    """
    scores = np.empty(len(vectors_KD), dtype=np.float32)
    query = np.asarray(query_D, dtype=np.float64)
    for start in range(0, len(vectors_KD), _BLOCK_ROWS):
        block = np.asarray(vectors_KD[start : start + _BLOCK_ROWS], dtype=np.float64)
        scores[start : start + len(block)] = (block * query).sum(axis=1)
    return scores


def first_size(num_candidates: int, num_passages: int, *, raw: bool) -> int:
    """How many proposals to begin with."""
    wanted = num_candidates if raw else num_candidates * _OVERSAMPLING
    return min(num_passages, wanted + SLACK)


def search_row(
    query_D: NDArray[np.float32],
    proposals: IntArray,
    propose: Propose,
    store: PassageStore,
    verdicts: Verdicts,
    *,
    num_candidates: int,
    nprobe: int | None,
    nlist: int | None,
    raw: bool,
) -> Accepted:
    """The ``num_candidates`` best accepted passages for one query row.

    Proposals are put in exact order (ties: lowest id) and walked. Where too few are accepted, or a
    tie may continue beyond the proposals, more are asked for: twice as many, or from twice as many
    inverted lists; and where FAISS has no more to give though the index does, all raw vectors are
    scanned. Only an exhausted index gives fewer than ``num_candidates``.

    Args:
        proposals: FAISS' first answer; its length is what was asked for.
        raw: whether FAISS' own scores are exact.
    """
    num_passages = len(store.vectors_ND)
    size = len(proposals)
    while True:
        ids = np.unique(proposals[proposals >= 0])
        scores = exact_scores(store.vectors_ND[ids], query_D)
        order = np.lexsort((ids, -scores))
        accepted, last_score = _walk(ids[order], scores[order], verdicts, num_candidates)
        exhausted = len(ids) == num_passages
        full = len(accepted.ids) == num_candidates
        cut_tie = raw and full and len(ids) == size and scores.min() >= last_score - _TIE
        if exhausted or (full and not cut_tie):
            return accepted
        short = len(ids) < size
        if short and nprobe is not None and nlist is not None and nprobe < nlist:
            nprobe = min(nlist, 2 * nprobe)
        elif size < num_passages and not short:
            size = min(num_passages, 2 * size)
        else:
            proposals = np.arange(num_passages, dtype=np.int64)
            continue
        proposals = propose(size, nprobe)


def _walk(
    ids: IntArray, scores: NDArray[np.float32], verdicts: Verdicts, num_candidates: int
) -> tuple[Accepted, float]:
    accepted = Accepted()
    last_score = -np.inf
    for (row, reason), score in zip(verdicts.of(ids.tolist()), scores.tolist(), strict=True):
        if reason:
            accepted.rejected[row] = reason
            continue
        accepted.ids.append(row)
        last_score = score
        if len(accepted.ids) == num_candidates:
            break
    return accepted, last_score
