"""The tables of a report."""

import math

from ttt_adapt.evaluation.report.charts import mean_seconds, subset_rows
from ttt_adapt.evaluation.report.digits import NONE, bits, bounds, percent, seconds
from ttt_adapt.evaluation.report.markup import Child, Markup, join, tag
from ttt_adapt.evaluation.report.pairing import Arm, Pairing, Point
from ttt_adapt.evaluation.report.palette import Look, css_color

MAX_LISTED = 40
"""Rows of failures shown; all are counted."""


def summary_table(pairing: Pairing, looks: list[Look]) -> Markup:
    """One row an arm: after all its steps, against base."""
    best = pairing.ranked[0] if len(pairing.ranked) > 1 else None
    header = ["arm", "steps", "bits per byte", "% of base", "95% interval", "wins–losses"]
    if not pairing.same_model:
        header.insert(1, "model")
    if pairing.pile_weights is not None:
        header.append("pile_all, % of base")
    header += ["failures", "stopped early", "s per query"]
    rows = []
    for arm, look in zip(pairing.arms, looks, strict=True):
        point = arm.last
        ratio = point.ratio if point else None
        cells: list[Child] = [
            (0 if arm.is_base else point.step) if point else NONE,
            tag("b", bits(point.bits_per_byte)) if point else NONE,
            percent(ratio.value) if ratio else NONE,
            _interval(arm, point),
            _wins(point) if ratio and not arm.is_base else NONE,
            *_pile_all(pairing, arm),
            arm.num_failed + arm.num_not_finite,
            arm.num_stopped,
            seconds(sum(mean_seconds(arm, pairing.query_ids).values())),
        ]
        if not pairing.same_model:
            cells.insert(0, arm.run.model or NONE)
        rows.append(
            tag(
                "tr",
                tag("th", swatch(look), arm.label, scope="row"),
                *(tag("td", cell) for cell in cells),
                class_="best" if arm is best else None,
            )
        )
    return _table(header, rows)


def steps_table(pairing: Pairing, looks: list[Look]) -> Markup:
    """Every arm at every step: bits per byte, share of base with interval, wins and losses."""
    steps = sorted({point.step for arm in pairing.arms for point in arm.points})
    rows = []
    for arm, look in zip(pairing.arms, looks, strict=True):
        at = {point.step: point for point in arm.points}
        cells = [_point_cell(arm, at.get(step)) for step in steps]
        rows.append(
            tag("tr", tag("th", swatch(look), arm.label, scope="row"), *cells),
        )
    return _table(["arm", *(f"{step} steps" if step != 1 else "1 step" for step in steps)], rows)


def subsets_table(pairing: Pairing, looks: list[Look]) -> Markup:
    """The numbers behind the bars by subset."""
    look_of = dict(zip((arm.label for arm in pairing.arms), looks, strict=True))
    ranked = pairing.ranked
    rows = []
    for name, positions in subset_rows(pairing):
        cells = []
        for arm in ranked:
            interval = pairing.ratio(arm, positions)
            value = percent(interval.value) if interval else NONE
            cells.append(tag("td", value, tag("small", bounds(interval))))
        num_bytes = int(pairing.texts.num_bytes_Q[positions].sum())
        rows.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                tag("td", f"{len(positions):,}"),
                tag("td", f"{num_bytes:,}"),
                *cells,
            )
        )
    names = [join(swatch(look_of[arm.label]), arm.label) for arm in ranked]
    return _table(["subset", "texts", "bytes", *names], rows)


def problems_table(pairing: Pairing) -> tuple[int, Markup]:
    """How many queries failed, had no finite score or stopped early, and the first of them."""
    rows = []
    for arm in pairing.arms:
        for result in arm.run.results.values():
            if result.failure:
                what, why = "failed", result.failure
            elif any(not math.isfinite(nats) for nats in result.nats) or not result.num_bytes:
                what, why = "not scored", "a score is not a finite number, or the text is empty"
            elif result.stopped:
                what = "stopped early"
                why = f"{result.stopped} after step {result.num_steps}; last good weights scored"
            else:
                continue
            rows.append((arm.label, result.query_id, result.subset, what, why))
    shown = [
        tag(
            "tr",
            tag("th", label, scope="row"),
            *(tag("td", value, class_="text") for value in values),
        )
        for label, *values in rows[:MAX_LISTED]
    ]
    return len(rows), _table(["arm", "query", "subset", "what", "why"], shown, text=True)


def swatch(look: Look) -> Markup:
    """A small square of an arm's colour."""
    return tag("span", class_="swatch", style=f"background:{css_color(look.color)}")


def _point_cell(arm: Arm, point: Point | None) -> Markup:
    if point is None:
        return tag("td", NONE)
    if point.ratio is None or arm.is_base or point.step == 0:
        return tag("td", tag("b", bits(point.bits_per_byte)))
    return tag(
        "td",
        tag("b", bits(point.bits_per_byte)),
        tag("small", percent(point.ratio.value)),
        tag("small", bounds(point.ratio)),
        tag("small", _wins(point)),
    )


def _interval(arm: Arm, point: Point | None) -> Child:
    """The interval, coloured where it lies on one side of base."""
    if point is None or point.ratio is None or arm.is_base:
        return NONE
    side = "good" if point.ratio.high < 1.0 else "bad" if point.ratio.low > 1.0 else None
    return tag("span", bounds(point.ratio), class_=side)


def _pile_all(pairing: Pairing, arm: Arm) -> list[Child]:
    """A cell for the Pile's own weighting, where there is a column for it."""
    if pairing.pile_weights is None:
        return []
    interval = None if arm.is_base else pairing.pile_all(arm)
    if interval is None:
        return [NONE]
    return [join(percent(interval.value), tag("small", bounds(interval)))]


def _wins(point: Point | None) -> str:
    return f"{point.wins}–{point.losses}" if point else NONE


def _table(header: list[str] | list[Child], rows: list[Markup], *, text: bool = False) -> Markup:
    cells = [
        tag("th", name, scope="col", class_="text" if text or place == 0 else None)
        for place, name in enumerate(header)
    ]
    table = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *rows))
    return tag("div", table, class_="scroll", tabindex="0")
