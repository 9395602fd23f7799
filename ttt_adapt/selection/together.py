"""SIFT for many single-row queries over one pool, in step: one matrix product a pick for all.

Shape legend: B queries in step, K candidates, D width, t picks so far.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.greedy import asked_precision, greedy_picks
from ttt_adapt.selection.pool import Pool, Precision, squared_norms, unusable_values
from ttt_adapt.selection.screening import CLAMP_EVERY, resolves
from ttt_adapt.selection.ties import Arbiter, Doubt
from ttt_adapt.types import FloatArray, IntArray

# Queries in step: enough for matrix products to pay, few enough for their state to stay in cache.
_MAX_QUERIES = 32


def picks_together(pools: Sequence[Pool], dtype: Precision | None) -> list[IntArray]:
    """Greedy picks ``[N]`` of each query; every pool holds the same candidates and settings.

    Rounding in the products differs from the one-by-one pass, but doubts are settled by the same
    arbiter, so the picks are the same. Memory: B·(4K + N·D) values, B at most 32.
    """
    first = pools[0]
    if not all(len(pool.queries) == 1 and pool.candidates is first.candidates for pool in pools):
        raise SelectionError(
            "queries in step: expected one row each and one pool, found others; select one by one"
        )
    precision = asked_precision(first, dtype)
    candidates: FloatArray = first.candidates.astype(precision, copy=False)
    with np.errstate(over="ignore"):
        norms2 = squared_norms(candidates)
    if precision == "float32" and not resolves(precision, first.noise_var, float(norms2.max())):
        precision = "float64"
        candidates = first.candidates.astype(precision, copy=False)
        norms2 = squared_norms(candidates)
    if not np.isfinite(norms2).all():
        raise unusable_values(first.candidates, "candidates")
    if not resolves(precision, first.noise_var, float(norms2.max())):
        return [np.asarray(greedy_picks(pool, dtype)) for pool in pools]
    result: list[IntArray] = []
    for start in range(0, len(pools), _MAX_QUERIES):
        some = pools[start : start + _MAX_QUERIES]
        result.extend(_InStep(some, candidates, norms2, precision).run())
    return result


class _InStep:
    def __init__(
        self,
        pools: Sequence[Pool],
        candidates_KD: FloatArray,
        norms2_K: FloatArray,
        precision: Precision,
    ) -> None:
        self._candidates = candidates_KD
        self._norms2 = norms2_K
        self._noise_var = pools[0].noise_var
        self._num_select = pools[0].num_select
        max_norm2 = float(norms2_K.max())
        self._alive = [pool.prior_var > 0.0 for pool in pools]
        width = candidates_KD.shape[1]
        self._doubts = [
            Doubt(precision, width, pool.prior_var, max_norm2, self._noise_var) for pool in pools
        ]
        self._arbiters = [Arbiter(pool) for pool in pools]
        kind = candidates_KD.dtype
        queries_BD = np.concatenate([pool.queries for pool in pools]).astype(kind)
        self._covariance = queries_BD @ candidates_KD.T
        self._noisy = np.tile(norms2_K + kind.type(self._noise_var), (len(pools), 1))
        self._scores = np.empty_like(self._noisy)
        self._work = np.empty_like(self._noisy)
        self._basis = np.empty((len(pools), self._num_select, width), kind)

    def run(self) -> list[IntArray]:
        """All picks of all queries."""
        num = len(self._doubts)
        picked = np.zeros((num, self._num_select), dtype=np.int64)
        for step in range(self._num_select):
            self._choose(step, picked)
            if step + 1 < self._num_select:
                self._condition(step, picked[:, step])
        return list(picked)

    def _choose(self, step: int, picked: IntArray) -> None:
        scores = self._scores
        every = np.arange(len(scores))
        np.multiply(self._covariance, self._covariance, out=scores)
        np.divide(scores, self._noisy, out=scores)
        leaders = scores.argmax(axis=1)
        best = scores[every, leaders]
        ratios = self._norms2[leaders] / self._noisy[every, leaders]
        scores[every, leaders] = -1.0
        second = scores[every, scores.argmax(axis=1)]
        scores[every, leaders] = best
        values = zip(best.tolist(), ratios.tolist(), second.tolist(), strict=True)
        for query, (score, ratio, runner_up) in enumerate(values):
            doubt = self._doubts[query]
            limit = doubt.limit(score, ratio)
            if self._alive[query] and runner_up >= 0.0 and runner_up**0.5 >= limit:
                leader = self._settle(query, limit, picked[query, :step])
                leaders[query] = leader
                ratio = float(self._norms2[leader] / self._noisy[query, leader])
            doubt.grow(score, ratio)
        picked[:, step] = np.where(self._alive, leaders, 0)

    def _settle(self, query: int, limit: float, picked: IntArray) -> int:
        doubt = self._doubts[query]
        threshold = limit * limit if limit > 0.0 else 0.0
        positions = np.flatnonzero(self._scores[query] >= threshold)
        left = positions[
            doubt.contenders(
                self._scores[query, positions],
                self._noisy[query, positions],
                self._norms2[positions],
                doubt.unit,
            )
        ]
        if len(left) == 1:
            return int(left[0])
        return self._arbiters[query].best(picked.tolist(), left)

    def _condition(self, step: int, leaders: IntArray) -> None:
        every = np.arange(len(leaders))
        scale = (1.0 / np.sqrt(self._noisy[every, leaders]))[:, None]
        chosen = self._candidates[leaders]
        directions = chosen
        if step:
            basis = self._basis[:, :step]
            coefficients = np.matmul(basis, chosen[:, :, None])
            directions = chosen - np.matmul(coefficients.transpose(0, 2, 1), basis)[:, 0]
        directions = np.multiply(directions, scale, out=self._basis[:, step])
        work = np.matmul(np.ascontiguousarray(directions), self._candidates.T, out=self._work)
        shares = self._covariance[every, leaders][:, None] * scale
        np.multiply(work, shares, out=self._scores)
        np.subtract(self._covariance, self._scores, out=self._covariance)
        np.multiply(work, work, out=work)
        np.subtract(self._noisy, work, out=self._noisy)
        if not step % CLAMP_EVERY:
            floor = self._noisy.dtype.type(self._noise_var)
            np.maximum(self._noisy, floor, out=self._noisy)


def with_query(pool: Pool, other: Pool) -> Pool:
    """``pool``'s candidates with ``other``'s queries: one object for one shared array."""
    return dataclasses.replace(other, candidates=pool.candidates)
