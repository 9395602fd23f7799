"""The fast pass of SIFT on the CPU: residual variances and covariances of all candidates.

One pass over the candidates a pick. State beside the candidates: K·(M + 4) + t·D values.

Shape legend: K candidates, M query rows (after reduction at most D), D width, t picks so far.
"""

from typing import Any, Protocol

import numpy as np

from ttt_adapt.selection.pool import Float64Array, squared_norms
from ttt_adapt.selection.products import ProductScreen
from ttt_adapt.types import FloatArray

_BLOCK_ELEMENTS = 32768


# A fast pass loses v to rounding as ε/λ: at these shares of the largest ‖x‖², by 6 % of λ in the worst
# pool tried (rank three, 4096 wide). Above them v + λ stays positive and scores mean something.
_LEAST_NOISE = {"float32": 1e-3, "float64": 1e-8}


def resolves(precision: str, noise_var: float, max_norm2: float) -> bool:
    """Whether a fast pass in this precision can tell λ from rounding."""
    return noise_var >= _LEAST_NOISE[precision] * max_norm2


# Picks between two clampings of v at zero, where thousands of picks would let rounding add up.
CLAMP_EVERY = 16


class Screen(Protocol):
    """What a greedy loop needs; implemented for numpy and for tensors."""

    max_norm2: float

    def leader(self) -> tuple[int, float, float, float]:
        """The best candidate, its score and ‖x‖²/(v+λ), and the runner-up's score."""

    def ratio(self, position: int) -> float:
        """‖x‖²/(v+λ) of a candidate."""

    def above(self, threshold: float) -> tuple[Any, FloatArray, FloatArray, FloatArray]:
        """Positions of candidates with at least this score, and their scores, v + λ and ‖x‖²."""

    def pick(self, position: int) -> None:
        """Condition on a candidate."""

    def ban(self, position: int) -> None:
        """Never lead with this candidate again."""


class _NumpyScreen:
    """What both screens below hold: v + λ and the covariances with the query rows, kept up to date
    after each pick by one direction of a basis (Gram-Schmidt in the space of embeddings).
    """

    def __init__(
        self,
        candidates_KD: FloatArray,
        noise_var: float,
        num_select: int,
        norms2_K: FloatArray,
        covariance: FloatArray,
    ) -> None:
        kind = candidates_KD.dtype
        num, width = candidates_KD.shape
        self._candidates = candidates_KD
        self._norms2 = norms2_K
        self.max_norm2 = float(norms2_K.max())
        self._noise = kind.type(noise_var)
        self._noisy = norms2_K + self._noise
        self._covariance = covariance
        self._scores = np.empty(num, kind)
        self._work = np.empty(num, kind)
        self._basis = np.empty((num_select, width), kind)
        self._num_picked = 0
        self._banned: list[int] = []

    def _lead(self, scores_K: FloatArray) -> tuple[int, float, float, float]:
        if self._banned:
            scores_K[self._banned] = -1.0
        first = int(scores_K.argmax())
        best = scores_K.item(first)
        # Faster than a maximum: argmax is one call without a dispatcher in Python.
        scores_K[first] = -1.0
        second = scores_K.item(int(scores_K.argmax()))
        scores_K[first] = best
        return first, best, self._norms2.item(first) / self._noisy.item(first), second

    def ratio(self, position: int) -> float:
        return self._norms2.item(position) / self._noisy.item(position)

    def above(self, threshold: float) -> tuple[Any, FloatArray, FloatArray, FloatArray]:
        positions = np.flatnonzero(self._scores >= threshold)
        return positions, self._scores[positions], self._noisy[positions], self._norms2[positions]

    def _explain(self, work_K: FloatArray) -> None:
        """Take what the new direction explains of each candidate off v + λ; ``work_K`` is lost."""
        np.multiply(work_K, work_K, work_K)
        np.subtract(self._noisy, work_K, self._noisy)
        if not self._num_picked % CLAMP_EVERY:
            np.maximum(self._noisy, self._noise, out=self._noisy)
        self._num_picked += 1

    def ban(self, position: int) -> None:
        self._banned.append(position)


class SingleRowScreen(_NumpyScreen):
    """For one query row: nothing but vectors of length K, and as few calls a pick as there can be."""

    def __init__(
        self,
        candidates_KD: FloatArray,
        queries_MD: Float64Array,
        noise_var: float,
        num_select: int,
        norms2_K: FloatArray,
    ) -> None:
        kind = candidates_KD.dtype
        covariance_K = np.dot(candidates_KD, queries_MD[0].astype(kind))
        super().__init__(candidates_KD, noise_var, num_select, norms2_K, covariance_K)
        self._coefficients = np.empty(num_select, kind)
        self._scale = np.empty((), kind)
        self._share = np.empty((), kind)

    def leader(self) -> tuple[int, float, float, float]:
        scores = self._scores
        np.multiply(self._covariance, self._covariance, scores)
        np.divide(scores, self._noisy, scores)
        return self._lead(scores)

    def pick(self, position: int) -> None:
        step = self._num_picked
        candidate = self._candidates[position]
        direction = self._basis[step]
        work, scale, share = self._work, self._scale, self._share
        root = self._noisy.item(position) ** -0.5
        scale[()] = root
        share[()] = self._covariance.item(position) * root
        if step:
            basis, coefficients = self._basis[:step], self._coefficients[:step]
            np.dot(basis, candidate, coefficients)
            np.dot(coefficients, basis, direction)
            np.subtract(candidate, direction, direction)
            np.multiply(direction, scale, direction)
        else:
            np.multiply(candidate, scale, direction)
        np.dot(self._candidates, direction, work)
        np.multiply(work, share, self._scores)
        np.subtract(self._covariance, self._scores, self._covariance)
        self._explain(work)


class RowsScreen(_NumpyScreen):
    """For several query rows: their covariances with the candidates are a matrix ``[M, K]``."""

    def __init__(
        self,
        candidates_KD: FloatArray,
        queries_MD: Float64Array,
        noise_var: float,
        num_select: int,
        norms2_K: FloatArray,
    ) -> None:
        covariance_MK = np.dot(queries_MD.astype(candidates_KD.dtype), candidates_KD.T)
        super().__init__(candidates_KD, noise_var, num_select, norms2_K, covariance_MK)
        self._squares = np.einsum("mk,mk->k", covariance_MK, covariance_MK)
        self._block = max(16, _BLOCK_ELEMENTS // len(queries_MD))

    def leader(self) -> tuple[int, float, float, float]:
        return self._lead(np.divide(self._squares, self._noisy, self._scores))

    def pick(self, position: int) -> None:
        step = self._num_picked
        candidate = self._candidates[position]
        basis = self._basis[:step]
        scale = self._noisy.dtype.type(self._noisy.item(position) ** -0.5)
        direction = np.multiply(candidate - (basis @ candidate) @ basis, scale, self._basis[step])
        work = np.dot(self._candidates, direction, self._work)
        shares = (self._covariance[:, position] * scale)[:, None]
        # Blocks stay in the cache between the update and the sum of squares.
        for start in range(0, len(work), self._block):
            part = slice(start, start + self._block)
            covariance = self._covariance[:, part]
            covariance -= shares * work[None, part]
            np.einsum("mk,mk->k", covariance, covariance, out=self._squares[part])
        self._explain(work)


def prefers_products(num_candidates: int, width: int, num_rows: int) -> bool:
    """Whether products with vectors cost less than a covariance of every candidate with every row.

    Measured (``benchmarks/selection_large.py``): they take as long as D/8 rows do, and D² per pick
    beside, which a small pool does not earn back. Picks are the same.
    """
    return 8 * num_rows >= width and num_candidates * num_rows >= 4 * width * width


def numpy_screen(
    candidates_KD: FloatArray, queries_MD: Float64Array, noise_var: float, num_select: int
) -> Screen:
    """The right screen for the number of query rows."""
    norms2 = squared_norms(candidates_KD)
    if len(queries_MD) == 1:
        return SingleRowScreen(candidates_KD, queries_MD, noise_var, num_select, norms2)
    num, width = candidates_KD.shape
    if prefers_products(num, width, len(queries_MD)):
        return ProductScreen(candidates_KD, queries_MD, noise_var, norms2)
    return RowsScreen(candidates_KD, queries_MD, noise_var, num_select, norms2)
