"""Which candidate is best when rounding in the fast pass leaves several in question.

The rule, free of tolerances: the highest score in float64 as a function of the candidate's own
values; among equal scores the lowest position. Tolerances below only decide whom to ask. They
bound rounding from above, so a wider one costs time and changes no pick.

Shape legend: K candidates, D embedding width, n candidates in question.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ttt_adapt.selection.pool import Float64Array, Pool
from ttt_adapt.selection.posterior import Posterior
from ttt_adapt.types import FloatArray, IntArray

_EPSILON = {"float32": 2.0**-24, "float64": 2.0**-53}
# No proof but a measurement: for pools that are generic, of one sign, clustered, of low rank, of mixed
# scale or full of duplicates, widths 3 to 4096 and λ from 1e-3 to 100 ‖x‖², errors stay within three
# quarters of the bound (tests/selection/test_ties.py).
_SAFETY = 8.0
_BLOCK_ROWS = 1024


class Doubt:
    """How far rounding can have moved √s, the root of a candidate's score s = Σ c²/(v+λ).

    With ρ = ‖x‖²/(v+λ) of the candidate and T the prior variance of the query rows, the bound is
    unit · (√(Tρ) + √s·(1+ρ)) + lost · √s: rounding in c, in v, and subtractions that v + λ swallows
    whole. A pick is known up to rounding of its whole vector, so one that is nearly explained
    already (large ρ) and still tells much (large s) adds √(ρs/T) to every later error: ``unit``
    grows by that.
    """

    def __init__(
        self, precision: str, width: int, prior_var: float, max_norm2: float, noise_var: float
    ) -> None:
        self.root_prior = prior_var**0.5 or 1.0
        self._step = _SAFETY * _EPSILON[precision] * (1.0 + width / 1024) ** 0.5
        self._step *= min(1e6, max(1.0, 0.01 * max_norm2 / noise_var) ** 0.5)
        self.unit = self._step
        self._epsilon = _EPSILON[precision]
        self._lost = 0.0
        self._max_ratio = max_norm2 / noise_var

    def limit(self, score: Any, ratio: Any) -> Any:
        """Any candidate that could truly be as good as the leader has a √s of at least this.

        Args:
            score: the leader's s; a number, or an array with one leader an entry.
            ratio: the leader's ρ.
        """
        root = score**0.5
        largest = self._max_ratio
        spread = self.root_prior * (ratio**0.5 + largest**0.5) + root * (2.0 + ratio + largest)
        return root - self.unit * spread - 2.0 * self._lost * root

    def grow(self, score: Any, ratio: Any) -> None:
        """Take note of a pick."""
        self.unit = self.unit + self._step * (score * ratio) ** 0.5 / self.root_prior
        self._lost += self._epsilon

    def contenders(
        self, scores_n: FloatArray, noisy_n: FloatArray, norms2_n: FloatArray, unit: float
    ) -> IntArray:
        """Positions among ``n`` that each one's own bound leaves in question; ``noisy`` is v + λ."""
        ratio = norms2_n.astype(np.float64) / noisy_n
        roots = np.sqrt(np.maximum(scores_n, 0.0, dtype=np.float64))
        slack = unit * (self.root_prior * np.sqrt(ratio) + roots * (1.0 + ratio))
        slack += self._lost * roots
        return np.flatnonzero(roots + slack >= np.max(roots - slack))


class Arbiter:
    """Settles doubts about one query in float64. It follows the picks only when it is asked."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._posterior = Posterior(pool.queries, pool.noise_var, compact=True)

    def best(self, picked: Sequence[int], doubtful: IntArray) -> int:
        """The best of ``doubtful`` (ascending positions) after ``picked``."""
        behind = picked[self._posterior.num_picked :]
        if len(behind):
            for row in self._pool.rows(np.asarray(behind)):
                self._posterior.pick(row)
        left = self._narrow(doubtful)
        if len(left) == 1:
            return int(left[0])
        best, best_score = int(left[0]), -1.0
        seen: set[bytes] = set()
        for start in range(0, len(left), _BLOCK_ROWS):
            some = left[start : start + _BLOCK_ROWS]
            for position, row in zip(some.tolist(), self._pool.rows(some), strict=True):
                key = row.tobytes()
                if key in seen:
                    continue
                seen.add(key)
                score = self._posterior.gain(row)
                if score > best_score:
                    best, best_score = position, score
        return best

    def _narrow(self, doubtful: IntArray) -> IntArray:
        """Those that rounding in float64 leaves in question."""
        if len(doubtful) == 1:
            return doubtful
        scores = np.empty(len(doubtful))
        variances = np.empty(len(doubtful))
        norms2 = np.empty(len(doubtful))
        for start in range(0, len(doubtful), _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            rows = self._pool.rows(doubtful[part])
            scores[part], variances[part] = self._posterior.gains(rows)
            norms2[part] = np.einsum("nd,nd->n", rows, rows)
        noise_var = self._pool.noise_var
        prior_var, width = self._posterior.prior_var, rows.shape[1]
        doubt = Doubt("float64", width, prior_var, float(norms2.max()), noise_var)
        unit = doubt.unit * (1.0 + self._posterior.num_picked)
        if not scores.any():
            return doubtful[:1]
        return doubtful[doubt.contenders(scores, variances + noise_var, norms2, unit)]


def exact_best(
    approximate_K: Float64Array,
    slack: float,
    exact: Callable[[IntArray], Float64Array],
) -> int:
    """The highest of scores known up to ``slack``; ties by lowest position.

    Args:
        approximate_K: scores whose rounding may depend on the position.
        slack: bound of that rounding.
        exact: scores ``[n]`` of given positions, each a function of its row's values alone.
    """
    doubtful = np.flatnonzero(approximate_K >= approximate_K.max() - 2.0 * slack)
    if len(doubtful) == 1:
        return int(doubtful[0])
    return int(doubtful[np.argmax(exact(doubtful))])
