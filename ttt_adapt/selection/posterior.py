"""The Gaussian posterior every selector is judged by, in float64.

f(x) = θᵀx with θ ~ N(0, I); observing candidate x gives f(x) + noise of variance λ. With picks
x_1 … x_t, Σ_t = I − Σ_s g_s g_sᵀ where g_s = Σ_{s−1} x_s / √(x_sᵀ Σ_{s−1} x_s + λ).

Shape legend: K candidates, M query rows, D embedding width, n rows, t picks so far.
"""

from typing import Any

import numpy as np

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.pool import Float64Array, Matrix, Pool, read_pool
from ttt_adapt.types import FloatArray, IntArray, Selection

_BLOCK_PICKS = 128
_LEAST_COMPACT = 256
# Above this ratio of λ to the largest ‖x‖², a Cholesky factor of the picks' Gram matrix is exact to
# about 1e-12; below it the one-at-a-time form, whose error grows as ε/√λ instead of ε/λ, is used.
_CHOLESKY_NOISE = 1e-4
# A variance below this share of ‖x‖² is rounding: the picks explain the candidate.
_EXPLAINED = 1e-14


class Posterior:
    """Variance of the query rows, and of any candidate, given the candidates picked so far.

    Memory: t·(D + M) float64; with ``compact`` at most 2D·(D + M), by going over to Σ itself once there
    are more than 2D picks (and 256, below which it doesn't pay). Its numbers are functions of the values of the queries, λ and the
    picks alone, not of where in a pool a candidate stands: equal rows have equal gains, bit for
    bit.
    """

    def __init__(
        self, queries_MD: Float64Array, noise_var: float, *, compact: bool = False
    ) -> None:
        self._queries = np.ascontiguousarray(queries_MD, dtype=np.float64)
        self._noise_var = noise_var
        num_rows, width = self._queries.shape
        self._directions = np.empty((8, width))
        self._projected = np.empty((8, num_rows))
        # BLAS kernels may round differently at another alignment: one buffer for every candidate.
        self._candidate = np.empty(width)
        self._residual = np.empty(width)
        self._compact_from = max(2 * width, _LEAST_COMPACT) if compact else None
        # Σ and QΣ, once compact.
        self._sigma: Float64Array | None = None
        self._queries_left = self._queries
        self.num_picked = 0
        self.prior_var = float(np.vdot(self._queries, self._queries))
        self.total_var = self.prior_var

    @property
    def directions(self) -> Float64Array:
        """U ``[t, D]``: Σ_t = I − UᵀU; gone once compact."""
        assert self._sigma is None, "compact: Σ alone is kept"
        return self._directions[: self.num_picked]

    def pick(self, candidate_D: FloatArray) -> float:
        """Observe a candidate; return by how much the total variance of the query rows falls."""
        variance, covariance = self._condition(candidate_D)
        scale = 1.0 / np.sqrt(variance + self._noise_var) if variance > 0.0 else 0.0
        projected = covariance * scale
        self._remember(self._residual * scale, projected)
        gain = float(np.dot(projected, projected))
        gain = min(gain, self.total_var)
        self.total_var -= gain
        return gain

    def gain(self, candidate_D: FloatArray) -> float:
        """What :meth:`pick` would return (before its cap at the variance that is left)."""
        variance, covariance = self._condition(candidate_D)
        if variance <= 0.0:
            return 0.0
        return float(np.dot(covariance, covariance)) / (variance + self._noise_var)

    def variance(self, candidate_D: FloatArray) -> float:
        """Var(f(x)) given the picks."""
        return self._condition(candidate_D)[0]

    def gains(self, candidates_nD: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Gains and variances ``[n]`` of many candidates at once; equal to the above up to rounding."""
        norms2 = np.einsum("nd,nd->n", candidates_nD, candidates_nD)
        if self._sigma is None:
            basis, projected = self.directions, self._projected[: self.num_picked]
            coefficients = candidates_nD @ basis.T
            variances = norms2 - np.einsum("nt,nt->n", coefficients, coefficients)
            covariances = candidates_nD @ self._queries.T - coefficients @ projected
        else:
            variances = np.einsum("nd,nd->n", candidates_nD, candidates_nD @ self._sigma)
            covariances = candidates_nD @ self._queries_left.T
        variances[variances <= _EXPLAINED * norms2] = 0.0
        squares = np.einsum("nm,nm->n", covariances, covariances)
        squares[variances == 0.0] = 0.0
        return squares / (variances + self._noise_var), variances

    def extend(self, candidates_nD: Float64Array, *, last: bool = False) -> Float64Array:
        """Observe many candidates in order; return the gain ``[n]`` of each.

        ``last`` promises that nothing is asked of this posterior afterwards but its totals.
        """
        largest = float(np.einsum("nd,nd->n", candidates_nD, candidates_nD).max(initial=0.0))
        if self._compact_from is not None or self._noise_var < _CHOLESKY_NOISE * largest:
            return np.array([self.pick(row) for row in candidates_nD])
        total = len(candidates_nD)
        gains = np.empty(total)
        for start in range(0, total, _BLOCK_PICKS):
            stop = min(start + _BLOCK_PICKS, total)
            gains[start:stop] = self._extend_block(
                candidates_nD[start:stop], keep=not last or stop < total
            )
        self.total_var = max(0.0, self.total_var - float(gains.sum()))
        return gains

    def _extend_block(self, rows_nD: Float64Array, *, keep: bool) -> Float64Array:
        num, num_rows = len(rows_nD), len(self._queries)
        residuals = rows_nD
        if self.num_picked:
            residuals = rows_nD - (rows_nD @ self.directions.T) @ self.directions
        gram = rows_nD @ residuals.T
        gram.flat[:: num + 1] += self._noise_var
        covariance = residuals @ self._queries.T
        if not keep and num_rows <= num:
            # The factor of [[G + λI, B], [Bᵀ, C]] holds (L⁻¹B)ᵀ whatever C is, and numpy has no
            # triangular solve. C only has to exceed the variance the picks can explain.
            joint = np.zeros((num + num_rows, num + num_rows))
            joint[:num, :num] = gram
            joint[num:, :num] = covariance.T
            joint.flat[num * (num + num_rows + 1) :: num + num_rows + 1] = 2.0 * self.prior_var or 1
            projected = np.linalg.cholesky(joint)[num:, :num]
            return np.asarray(np.einsum("mn,mn->n", projected, projected))
        inverse = np.linalg.inv(np.linalg.cholesky(gram))
        projected = inverse @ covariance
        if keep:
            self._reserve(num)
            step = slice(self.num_picked, self.num_picked + num)
            self._projected[step] = projected
            np.dot(inverse, residuals, out=self._directions[step])
            self.num_picked += num
        return np.asarray(np.einsum("nm,nm->n", projected, projected))

    def _condition(self, candidate_D: FloatArray) -> tuple[float, Float64Array]:
        """Variance of a candidate and its covariance ``[M]`` with the query rows."""
        self._candidate[...] = candidate_D
        if self._sigma is not None:
            np.dot(self._sigma, self._candidate, out=self._residual)
        elif self.num_picked:
            basis = self.directions
            np.dot(np.dot(basis, self._candidate), basis, out=self._residual)
            np.subtract(self._candidate, self._residual, out=self._residual)
        else:
            self._residual[...] = self._candidate
        variance = float(np.dot(self._candidate, self._residual))
        if variance <= _EXPLAINED * float(np.dot(self._candidate, self._candidate)):
            variance = 0.0
        return variance, np.dot(self._queries, self._residual)

    def _remember(self, direction_D: Float64Array, projected_M: Float64Array) -> None:
        if self._sigma is None:
            self._reserve(1)
            self._directions[self.num_picked] = direction_D
            self._projected[self.num_picked] = projected_M
        else:
            self._sigma -= np.outer(direction_D, direction_D)
            self._queries_left -= np.outer(projected_M, direction_D)
        self.num_picked += 1
        if self.num_picked == self._compact_from:
            basis, projected = self.directions, self._projected[: self.num_picked]
            self._queries_left = self._queries - projected.T @ basis
            self._sigma = np.eye(basis.shape[1]) - basis.T @ basis
            self._directions, self._projected = self._directions[:0], self._projected[:0]

    def _reserve(self, num: int) -> None:
        needed = self.num_picked + num
        capacity = len(self._directions)
        if needed > capacity:
            capacity = max(needed, 2 * capacity)
            for name in ("_directions", "_projected"):
                old = getattr(self, name)
                new = np.empty((capacity, old.shape[1]))
                new[: self.num_picked] = old[: self.num_picked]
                setattr(self, name, new)


def posterior_variance(
    candidates: Matrix, queries: Matrix, indices: Any, noise_var: float
) -> Float64Array:
    """Total variance of the query rows after each pick: the obvious form, by one solve a pick.

    Args:
        candidates: ``[K, D]``.
        queries: ``[M, D]``.
        indices: ``[n]`` positions among the candidates, in order of picking.
        noise_var: λ.

    Returns:
        float64 ``[n]``: tr(Q Qᵀ − Q Pᵀ (P Pᵀ + λI)⁻¹ P Qᵀ), P the picks so far. Cost O(n⁴ + n³M):
        a reference, not a tool.

    Raises:
        SelectionError: as every selector; also for positions outside the pool.
    """
    order = np.atleast_1d(np.asarray(indices))
    pool = read_pool(candidates, queries, num_select=max(1, len(order)), noise_var=noise_var)
    _check_positions(order, pool.num_candidates)
    result = np.empty(len(order))
    for count in range(1, len(order) + 1):
        picks = pool.rows(order[:count])
        covariance = picks @ pool.queries.T
        gram = picks @ picks.T + noise_var * np.eye(count)
        explained = np.sum(covariance * np.linalg.solve(gram, covariance))
        result[count - 1] = pool.prior_var - explained
    return result


def as_selection(pool: Pool, indices: Any, method: str, *, approximate: bool = False) -> Selection:
    """A selection with the posterior of its picks, computed the same way for every method."""
    order: IntArray = np.asarray(indices, dtype=np.int64)
    posterior = Posterior(pool.queries, pool.noise_var)
    gains = posterior.extend(pool.rows(order), last=True)
    remaining = np.maximum(posterior.prior_var - np.cumsum(gains), 0.0)
    return Selection(
        indices=order,
        posterior_var=remaining,
        gains=gains,
        prior_var=posterior.prior_var,
        method=method,
        approximate=approximate,
    )


def _check_positions(order: Any, num_candidates: int) -> None:
    whole = order.ndim == 1 and (order.dtype.kind in "iu" or len(order) == 0)
    if not whole or (len(order) and not 0 <= order.min() <= order.max() < num_candidates):
        raise SelectionError(
            f"indices: expected whole positions from 0 to {num_candidates - 1}, found "
            f"{order.tolist()!s:.80}; pass Selection.indices of these candidates"
        )
