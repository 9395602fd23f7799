"""Nearest tasks for every target in turn, so that no target goes without.

Shape legend: K candidates, M targets, D width, d depth of a target's list.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.selection.pool import Float64Array, Pool
from ttt_adapt.selection.relevance import ROUNDING, by_relevance, row_maxima
from ttt_adapt.types import FloatArray, IntArray

_MAX_ENTRIES = 2**23
_BLOCK_ROWS = 2048


def round_robin(pool: Pool) -> list[int]:
    """Positions of ``pool.num_select`` candidates (at most K), each once.

    Targets take turns in their order, each taking its nearest candidate that is left (ties: the
    lowest position). Of more targets than picks, evenly spaced ones are served.

    Memory: M·min(N, 2²³/M) list entries; O(K·M·D) time, once.
    """
    num_select = min(pool.num_select, pool.num_candidates)
    num_targets = len(pool.queries)
    if num_targets > num_select:
        served = np.linspace(0, num_targets - 1, num_select).round().astype(np.int64)
    else:
        served = np.arange(num_targets)
    queues = _Queues(pool, served, num_select)
    picked: list[int] = []
    taken = np.zeros(pool.num_candidates, dtype=bool)
    while len(picked) < num_select:
        for turn in range(len(served)):
            position = queues.next_free(turn, taken)
            taken[position] = True
            picked.append(position)
            if len(picked) == num_select:
                break
    return picked


class _Queues:
    """For each target its candidates by falling similarity, as deep as anyone will look."""

    def __init__(self, pool: Pool, served: IntArray, num_select: int) -> None:
        self._pool = pool
        self._targets = pool.queries[served]
        depth = max(16, min(num_select + 8, _MAX_ENTRIES // len(served)))
        self._depth = min(depth, pool.num_candidates)
        self._orders, self._num_sure = self._rankings()
        self._next = [0] * len(served)

    def next_free(self, turn: int, taken: NDArray[np.bool_]) -> int:
        while True:
            place = self._next[turn]
            if place >= self._num_sure[turn]:
                self._rank_all(turn)
            order = self._orders[turn]
            self._next[turn] = place + 1
            position = int(order[place])
            if not taken[position]:
                return position

    def _rank_all(self, turn: int) -> None:
        target = Pool(self._pool.candidates, self._targets[turn][None, :], 1, 1.0)
        self._orders[turn] = by_relevance(target)
        self._num_sure[turn] = self._pool.num_candidates

    def _rankings(self) -> tuple[list[IntArray], list[int]]:
        scores, positions, largest = self._most_similar()
        orders, num_sure = [], []
        for target, values, places in zip(self._targets, scores, positions, strict=True):
            slack = 2.0 * ROUNDING * (largest * float(target @ target)) ** 0.5
            # Each by its own row alone, so that equal rows have equal similarities.
            exact = np.concatenate(
                [
                    row_maxima(self._pool.rows(places[start : start + 256]), target[None, :])
                    for start in range(0, len(places), 256)
                ]
            )
            order = np.lexsort((places, -exact))
            # Another may be as similar as the last in the list: what is that close to it is not
            # sure to come in this order.
            deep_enough = len(places) == self._pool.num_candidates
            edge = float(values.min()) + 2.0 * slack
            num_sure.append(len(places) if deep_enough else int((exact > edge).sum()))
            orders.append(places[order])
        return orders, num_sure

    def _most_similar(self) -> tuple[Float64Array, IntArray, float]:
        depth = self._depth
        scores = np.empty((len(self._targets), 0))
        positions = np.empty((len(self._targets), 0), dtype=np.int64)
        largest = 0.0
        for start, rows in _large_blocks(self._pool.on_cpu()):
            largest = max(largest, float(np.einsum("nd,nd->n", rows, rows).max()))
            here = np.arange(start, start + len(rows))
            scores = np.concatenate([scores, self._targets @ rows.T], axis=1)
            positions = np.concatenate(
                [positions, np.broadcast_to(here, (len(self._targets), len(here)))], axis=1
            )
            if scores.shape[1] > depth:
                keep = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
                scores = np.take_along_axis(scores, keep, axis=1)
                positions = np.take_along_axis(positions, keep, axis=1)
        return scores, positions, largest


def _large_blocks(array_KD: FloatArray) -> Iterator[tuple[int, Float64Array]]:
    for start in range(0, len(array_KD), _BLOCK_ROWS):
        yield start, array_KD[start : start + _BLOCK_ROWS].astype(np.float64)
