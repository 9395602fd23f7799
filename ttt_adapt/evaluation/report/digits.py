"""How numbers are written: enough digits to compare, no more."""

import math
from collections.abc import Iterable, Mapping

from ttt_adapt.evaluation.report.intervals import Interval

STAGES = ("embed", "retrieve", "select", "train", "score")
"""Stages of a query, in the order they happen; others follow by name."""

NONE = "–"


def bits(value: float) -> str:
    """Bits per byte."""
    return f"{value:.3f}" if math.isfinite(value) else NONE


def percent(ratio: float) -> str:
    """A ratio as a percentage."""
    return f"{100.0 * ratio:.1f}%" if math.isfinite(ratio) else NONE


def bounds(interval: Interval | None) -> str:
    """The two ends of an interval of ratios, in percent."""
    if interval is None or not math.isfinite(interval.low):
        return NONE
    return f"{100.0 * interval.low:.1f} to {100.0 * interval.high:.1f}"


def seconds(value: float) -> str:
    """Seconds, to about three digits."""
    if not math.isfinite(value):
        return NONE
    if value >= 100.0:
        return f"{value:.0f}"
    if value >= 10.0:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 or value == 0.0 else f"{value:.2g}"


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 text``, ``280 texts``, ``1,740 texts``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def ordered_stages(costs: Iterable[Mapping[str, float]]) -> list[str]:
    """Stages that took any time."""
    found = {stage for cost in costs for stage, value in cost.items() if value > 0.0}
    return [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))
