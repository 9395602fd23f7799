"""An arm against another over the same texts, as the ratio of their bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.evaluation.bootstrap import paired_bootstrap
from ttt_adapt.types import IntArray, Score

LEVEL = 0.95
"""Coverage of every interval in a report."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio; ``low`` and ``high`` are NaN where one text tells nothing about spread."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Texts:
    """What every arm of a report scored, and how it is resampled.

    Attributes:
        num_bytes_Q: int64, positive.
        subsets: of each text; resamples draw within each, as a run's own summary does.
    """

    num_bytes_Q: IntArray
    subsets: tuple[str, ...]
    num_resamples: int
    seed: int

    def bits_per_byte(self, nats_Q: NDArray[np.float64]) -> float:
        """−Σ ln p / (ln 2 · Σ bytes)."""
        return math.fsum(nats_Q) / (math.log(2.0) * int(self.num_bytes_Q.sum()))

    def ratio(
        self,
        nats_Q: NDArray[np.float64],
        base_Q: NDArray[np.float64],
        *,
        rows: IntArray | None = None,
        weights: dict[str, float] | None = None,
    ) -> Interval:
        """Bits per byte over the base's, with its paired bootstrap interval.

        Args:
            nats_Q: float64.
            base_Q: float64, of the same texts.
            rows: only these texts; ``None``: all.
            weights: by subset, as in
                :func:`~ttt_adapt.evaluation.bootstrap.paired_bootstrap`.
        """
        kept = range(len(self.subsets)) if rows is None else [int(row) for row in rows]
        found = paired_bootstrap(
            self._scores(base_Q, kept),
            self._scores(nats_Q, kept),
            subsets=[self.subsets[row] for row in kept],
            weights=weights,
            num_resamples=self.num_resamples,
            seed=self.seed,
            level=LEVEL,
        )
        return Interval(found.ratio, found.ratio_low, found.ratio_high)

    def _scores(self, nats_Q: NDArray[np.float64], rows: Sequence[int]) -> list[Score]:
        return [Score(float(nats_Q[row]), int(self.num_bytes_Q[row]), 0) for row in rows]
