"""SIFT's fast pass for many query rows: no covariance of every candidate with every row.

With P = QΣ (M × D) a candidate's score is ‖Px‖² / (v + λ). A pick changes P by a rank-one term,
P' = P − κgᵀ with κ = Qg, so that ‖P'x‖² = ‖Px‖² − 2 (gᵀx)(hᵀx) + (gᵀx)² ‖κ‖², h = Pᵀκ: two products
of the candidates with a vector a pick, whatever M is, and three values a candidate. These
subtractions cancel where ‖Px‖² falls far, so each candidate carries a bound of its rounding, and
whoever could be best by that bound is scored again from P, which is kept in float64.

Shape legend as in ``screening.py``; n candidates scored again.
"""

from typing import Any

import numpy as np

from ttt_adapt.selection.pool import Float64Array
from ttt_adapt.types import FloatArray, IntArray

# The same safety as the bounds of ``ties.py`` have.
_SAFETY = 8.0
_BLOCK_BYTES = 2**19
_BLOCK_ROWS = 2048
_CLAMP_EVERY = 16


class ProductScreen:
    """A :class:`~ttt_adapt.selection.screening.Screen` of K·5 + D·(D + M) values."""

    def __init__(
        self,
        candidates_KD: FloatArray,
        queries_MD: Float64Array,
        noise_var: float,
        norms2_K: FloatArray,
    ) -> None:
        kind = candidates_KD.dtype
        num, width = candidates_KD.shape
        self._candidates = candidates_KD
        self._norms2 = norms2_K
        self.max_norm2 = float(norms2_K.max())
        self._noise_var = noise_var
        self._noisy = norms2_K + kind.type(noise_var)
        self._covariance = np.eye(width)
        self._rows = queries_MD.copy()
        self._block = max(16, _BLOCK_BYTES // (width * kind.itemsize))
        self._unit = _SAFETY * float(np.finfo(kind).eps) / 2.0 * (1.0 + width / 1024) ** 0.5
        self._error = 0.0
        self._error_then = np.zeros(num)
        self._squares = np.empty(num)
        self._along = np.empty(num, kind)
        self._across = np.empty(num, kind)
        self._scores = np.empty(num)
        self._banned: list[int] = []
        self._num_picked = 0
        for start in range(0, num, _BLOCK_ROWS):
            self._score_again(np.arange(start, min(start + _BLOCK_ROWS, num)))

    def leader(self) -> tuple[int, float, float, float]:
        scores = self._scores
        while True:
            np.divide(self._squares, self._noisy, out=scores)
            margins = self._margins()
            if self._banned:
                scores[self._banned] = -1.0
                margins[self._banned] = 0.0
            surely = float((scores - margins).max())
            upper = np.add(scores, margins, out=margins)
            stale = np.flatnonzero((upper >= surely) & (self._error_then < self._error))
            if self._banned:
                stale = stale[scores[stale] >= 0.0]
            if not len(stale):
                break
            for start in range(0, len(stale), _BLOCK_ROWS):
                self._score_again(stale[start : start + _BLOCK_ROWS])
        first = int(scores.argmax())
        best = float(scores[first])
        upper[first] = -1.0
        return first, best, self.ratio(first), float(upper.max())

    def ratio(self, position: int) -> float:
        return float(self._norms2[position]) / float(self._noisy[position])

    def above(self, threshold: float) -> tuple[Any, FloatArray, FloatArray, FloatArray]:
        """As any screen; scores that may reach the threshold are made exact before."""
        near = np.flatnonzero((self._scores >= 0.0) & (self._scores + self._margins() >= threshold))
        stale = near[self._error_then[near] < self._error]
        for start in range(0, len(stale), _BLOCK_ROWS):
            self._score_again(stale[start : start + _BLOCK_ROWS])
        self._scores[near] = self._squares[near] / self._noisy[near]
        positions = near[self._scores[near] >= threshold]
        return (
            positions,
            self._scores[positions],
            self._noisy[positions],
            self._norms2[positions],
        )

    def pick(self, position: int) -> None:
        candidate = self._candidates[position].astype(np.float64)
        residual = self._covariance @ candidate
        scale = (max(float(candidate @ residual), 0.0) + self._noise_var) ** -0.5
        direction = residual * scale
        shares = (self._rows @ candidate) * scale
        pull = shares @ self._rows
        energy = float(shares @ shares)
        along, across = self._along, self._across
        kind = along.dtype
        cast_direction, cast_pull = direction.astype(kind), pull.astype(kind)
        # Both products while a block is in the cache: memory is read once.
        for start in range(0, len(along), self._block):
            part = slice(start, start + self._block)
            rows = self._candidates[part]
            np.dot(rows, cast_direction, out=along[part])
            np.dot(rows, cast_pull, out=across[part])
        # ‖Px‖² falls by w(2d − w‖κ‖²), in float64 from here on.
        fall = np.multiply(across, 2.0, dtype=np.float64)
        fall -= np.multiply(along, energy, dtype=np.float64)
        fall *= along
        self._squares -= fall
        np.maximum(self._squares, 0.0, out=self._squares)
        np.multiply(along, along, along)
        self._noisy -= along
        if not self._num_picked % _CLAMP_EVERY:
            np.maximum(self._noisy, self._noisy.dtype.type(self._noise_var), out=self._noisy)
        self._covariance -= np.outer(direction, direction)
        self._rows -= np.outer(shares, direction)
        length = float(direction @ direction) ** 0.5
        reach = 2.0 * float(pull @ pull) ** 0.5 + length * energy
        self._error += 2.0 * self._unit * length * reach
        self._num_picked += 1

    def ban(self, position: int) -> None:
        self._banned.append(position)

    def _margins(self) -> Float64Array:
        """How far each score may be off by the subtractions since it was last made from P."""
        margins = np.subtract(self._error, self._error_then)
        margins *= self._norms2
        margins /= self._noisy
        return np.asarray(margins)

    def _score_again(self, positions_n: IntArray) -> None:
        rows = self._rows.astype(self._candidates.dtype)
        products = self._candidates[positions_n] @ rows.T
        self._squares[positions_n] = np.einsum("nm,nm->n", products, products)
        self._error_then[positions_n] = self._error
