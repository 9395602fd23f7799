"""Paired bootstrap of corpus-level bits per byte: is one arm better than another on these texts?

Texts differ far more from each other than two arms differ on one text. So both arms are scored on
the same texts, and texts are resampled in pairs: each resample draws as many texts as there are,
with replacement, and recomputes Σ nats / Σ bytes of both arms. The middle 95 % of the differences
is the confidence interval (percentile method; Efron and Tibshirani 1993, chapter 13).

Shape legend: n texts, R resamples, S strata, C columns that are summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import SettingsError, UserError
from ttt_adapt.types import Score

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairedBootstrap:
    """The difference between two arms on the same texts, and how sure it is.

    Attributes:
        base: bits per byte of the base arm.
        other: bits per byte of the other arm.
        difference: ``other − base``, in bits per byte: negative where the other arm is better.
        low: lower end of the difference's confidence interval; NaN with fewer than two texts.
        high: upper end.
        ratio: ``other / base``.
        ratio_low: lower end of the ratio's confidence interval.
        ratio_high: upper end.
        wins: texts on which the other arm needs fewer nats.
        losses: texts on which it needs more.
        ties: texts on which it needs exactly as many.
        share_not_better: share of resamples in which the other arm is not better: what a
            one-sided p-value approximates. NaN with fewer than two texts.
        num_texts: texts that count; empty ones have nothing to compare and are left out.
        num_resamples: R.
        level: of the intervals.
    """

    base: float
    other: float
    difference: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    wins: int
    losses: int
    ties: int
    share_not_better: float
    num_texts: int
    num_resamples: int
    level: float


def paired_bootstrap(
    base: Sequence[Score],
    other: Sequence[Score],
    *,
    subsets: Sequence[str] | None = None,
    weights: dict[str, float] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> PairedBootstrap:
    """Compare two arms on the same texts.

    Args:
        base: one score a text.
        other: the other arm's, in the same order.
        subsets: the subset of each text: resamples then draw within each subset, so that every
            one holds as many texts of it as there are. ``None``: all texts are one stratum.
        weights: by subset, summing to 1: bits per byte are then the weighted mean of the subsets'
            own ratios (``pile_all``) instead of one ratio over all texts. Needs ``subsets``.
        num_resamples: R.
        seed: of the resampling. The draw depends on the order of the texts.
        level: of the confidence intervals.

    Raises:
        UserError: different numbers of texts, texts of different bytes, values that are not
            finite, no bytes at all, or weights that miss a subset.
        SettingsError: ``num_resamples`` or ``level`` out of range.
    """
    if num_resamples < 1:
        raise SettingsError(f"num_resamples must be at least 1, found {num_resamples}")
    if not 0.0 < level < 1.0:
        raise SettingsError(f"level must be between 0 and 1, found {level}")
    columns_nC, kept = _columns(base, other)
    if subsets is None:
        if weights is not None:
            raise UserError("weights are by subset: pass subsets too")
        subsets = [""] * len(base)
    if len(subsets) != len(base):
        raise UserError(f"expected one subset a text: {len(base)} texts, {len(subsets)} subsets")
    names, strata_n = np.unique([subsets[i] for i in kept], return_inverse=True)
    weights_S: Floats | None = None
    if weights is not None:
        if missing := [str(name) for name in names if name not in weights]:
            raise UserError(f"no weight for {', '.join(missing)}")
        weights_S = np.array([weights[str(name)] for name in names])

    whole = _per_byte(_sum_strata(columns_nC, strata_n)[None], weights_S)[:, 0]
    differences = ratios = np.full(num_resamples, np.nan)
    if len(kept) > 1:
        sums_RSC = resample_sums(columns_nC, strata_n, num_resamples=num_resamples, seed=seed)
        bpb_2R = _per_byte(sums_RSC, weights_S)
        differences, ratios = bpb_2R[1] - bpb_2R[0], _divide(bpb_2R[1], bpb_2R[0])
    tails = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
    low, high = np.quantile(differences, tails)
    ratio_low, ratio_high = np.quantile(ratios, tails)
    change_n = columns_nC[:, 1] - columns_nC[:, 0]
    return PairedBootstrap(
        base=float(whole[0]),
        other=float(whole[1]),
        difference=float(whole[1] - whole[0]),
        low=float(low),
        high=float(high),
        ratio=float(_divide(whole[1:], whole[:1])[0]),
        ratio_low=float(ratio_low),
        ratio_high=float(ratio_high),
        wins=int((change_n < 0).sum()),
        losses=int((change_n > 0).sum()),
        ties=int((change_n == 0).sum()),
        share_not_better=float((differences >= 0).mean()) if len(kept) > 1 else float("nan"),
        num_texts=len(kept),
        num_resamples=num_resamples,
        level=level,
    )


def resample_sums(
    columns_nC: Floats,
    strata_n: NDArray[np.int64],
    *,
    num_resamples: int,
    seed: int,
    max_draws: int = 2**21,
) -> Floats:
    """Per-stratum column sums of R resamples, ``[R, S, C]`` float64.

    Each resample draws within each stratum as many rows as it has, with replacement.

    Args:
        columns_nC: float64, what to sum.
        strata_n: int64 stratum of each row, 0 … S−1, each with at least one row.
        num_resamples: R.
        seed: of the draws.
        max_draws: draws held in memory at once; the result does not depend on it.
    """
    generator = np.random.default_rng(seed)
    num_strata = int(strata_n.max()) + 1
    sums_RSC = np.empty((num_resamples, num_strata, columns_nC.shape[1]))
    for stratum in range(num_strata):
        rows_mC = columns_nC[strata_n == stratum]
        block = max(1, max_draws // len(rows_mC))
        for first in range(0, num_resamples, block):
            last = min(first + block, num_resamples)
            drawn = generator.integers(len(rows_mC), size=(last - first, len(rows_mC)))
            # How often each row was drawn; then the sums are one matrix product.
            flat = drawn + np.arange(last - first)[:, None] * len(rows_mC)
            counts = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
            sums_RSC[first:last, stratum] = counts.astype(np.float64) @ rows_mC
    return sums_RSC


def _columns(base: Sequence[Score], other: Sequence[Score]) -> tuple[Floats, list[int]]:
    """Nats of base and other and bytes, ``[n, 3]``, of the texts that have bytes."""
    if len(base) != len(other):
        raise UserError(f"expected the same texts in both arms: {len(base)} and {len(other)}")
    for position, (one, two) in enumerate(zip(base, other, strict=True)):
        if one.num_bytes != two.num_bytes:
            raise UserError(
                f"text {position} has {one.num_bytes} bytes in one arm and {two.num_bytes} in "
                "the other: not the same text"
            )
        if not (np.isfinite(one.nats) and np.isfinite(two.nats)):
            raise UserError(
                f"text {position} has {one.nats} and {two.nats} nats: leave texts without a "
                "finite score out, and count them"
            )
    kept = [position for position, score in enumerate(base) if score.num_bytes]
    if not kept:
        raise UserError("expected at least one text with bytes to compare, found none")
    columns = [(base[i].nats, other[i].nats, float(base[i].num_bytes)) for i in kept]
    return np.array(columns, dtype=np.float64), kept


def _sum_strata(columns_nC: Floats, strata_n: NDArray[np.int64]) -> Floats:
    sums_SC = np.zeros((int(strata_n.max()) + 1, columns_nC.shape[1]))
    np.add.at(sums_SC, strata_n, columns_nC)
    return sums_SC


def _per_byte(sums_RSC: Floats, weights_S: Floats | None) -> Floats:
    """Bits per byte of base and other, ``[2, R]``."""
    if weights_S is None:
        totals_RC = sums_RSC.sum(axis=1)
        ratios_R2 = totals_RC[:, :2] / totals_RC[:, 2:]
    else:
        ratios_R2 = np.einsum("s,rsc->rc", weights_S, sums_RSC[..., :2] / sums_RSC[..., 2:])
    return np.asarray(ratios_R2.T / np.log(2.0))


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """Quotients; NaN, not a warning, where a perfect model needs next to no bits at all."""
    quotients = np.full(numerator.shape, np.nan)
    with np.errstate(over="ignore"):
        np.divide(numerator, denominator, out=quotients, where=denominator != 0)
    quotients[np.isinf(quotients)] = np.nan
    return quotients
