"""The figures of a report. Each function returns ``None`` when there is nothing to draw."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ttt_adapt.evaluation.report.correlation import rank_correlation
from ttt_adapt.evaluation.report.digits import ordered_stages, percent, seconds
from ttt_adapt.evaluation.report.drawing import Chart, finish, new_figure
from ttt_adapt.evaluation.report.markup import shorten
from ttt_adapt.evaluation.report.pairing import Arm, Pairing
from ttt_adapt.evaluation.report.palette import BASE, INK, MUTED, PAPER, STAGES, Look

MAX_SUBSETS = 40
LABEL_LENGTH = 30


def steps_chart(pairing: Pairing, looks: list[Look]) -> Chart | None:
    """Bits per byte against steps, with paired bands: each arm's interval for its ratio to base,
    drawn at the base's height. (The spread between texts is common to all arms and left out.)"""
    drawn = [
        (arm, look)
        for arm, look in zip(pairing.arms, looks, strict=True)
        if arm.points and not arm.is_base
    ]
    if not drawn:
        return None
    figure = new_figure(4.4)
    axes = figure.add_subplot()
    last_step = max(point.step for arm, _ in drawn for point in arm.points)
    ends = []
    for value, name in _bases(pairing):
        axes.axhline(value, color=BASE, linewidth=1.2, linestyle="--", zorder=1.5)
        ends.append((last_step, value, name, Look(BASE)))
    for arm, look in drawn:
        steps = [point.step for point in arm.points]
        values = [point.bits_per_byte for point in arm.points]
        bounds = _bounds(arm)
        if bounds is not None:
            axes.fill_between(steps, *bounds, color=look.color, alpha=0.16, linewidth=0)
        axes.plot(
            steps,
            values,
            color=look.color,
            marker=look.marker,
            linestyle=look.dashes,
            markersize=5,
            linewidth=1.8,
            zorder=3,
        )
        if bounds is not None and len(steps) == 1:
            axes.vlines(steps, *bounds, color=look.color, linewidth=1.4)
        last = arm.points[-1]
        text = shorten(arm.label, LABEL_LENGTH)
        if last.ratio is not None and math.isfinite(last.ratio.value):
            text += f"  {percent(last.ratio.value)}"
        ends.append((steps[-1], values[-1], text, look))
    every_step = sorted({point.step for arm, _ in drawn for point in arm.points})
    axes.set_xscale("symlog", linthresh=1.0, linscale=0.6)
    axes.set_xticks(every_step, labels=[str(step) for step in every_step])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(0, every_step[0]), max(1, last_step) * 1.02)
    axes.set_xlabel("steps learned (passages)")
    axes.set_ylabel("bits per byte (less is better)")
    _label_ends(axes, ends)
    description = "Bits per byte against steps: " + "; ".join(
        f"{text} after {step} steps, {value:.3f}" for step, value, text, _ in ends
    )
    return finish(figure, "bits-per-byte", description)


def subsets_chart(pairing: Pairing, looks: list[Look]) -> Chart | None:
    """Change against base after all steps, by subset: most improved by the best arm on top."""
    ranked = pairing.ranked
    if not ranked:
        return None
    rows = subset_rows(pairing)[: MAX_SUBSETS + 1]
    bar = min(0.13, max(0.09, 0.5 / len(ranked)))
    columns = _columns([arm.label for arm in ranked])
    legend = -(-len(ranked) // columns)
    figure = new_figure(0.72 + 0.23 * legend + len(rows) * (bar * len(ranked) + 0.11))
    axes = figure.add_subplot()
    look_of = dict(zip((arm.label for arm in pairing.arms), looks, strict=True))
    pitch = bar * len(ranked) + 0.11
    for place, arm in enumerate(ranked):
        intervals = [pairing.ratio(arm, positions) for _, positions in rows]
        centres = [row * pitch + place * bar for row in range(len(rows))]
        values = [math.nan if i is None else 100.0 * (i.value - 1.0) for i in intervals]
        axes.barh(
            centres,
            values,
            height=bar * 0.86,
            color=look_of[arm.label].color,
            hatch=look_of[arm.label].hatch,
            edgecolor=PAPER,
            linewidth=0,
            label=shorten(arm.label, LABEL_LENGTH),
            zorder=2,
        )
        for centre, interval in zip(centres, intervals, strict=True):
            if interval is not None and math.isfinite(interval.low):
                low, high = 100.0 * (interval.low - 1.0), 100.0 * (interval.high - 1.0)
                axes.plot([low, high], [centre, centre], color=INK, linewidth=0.9, zorder=3)
    axes.axvline(0.0, color=MUTED, linewidth=1.0, zorder=2.5)
    if len(rows) > 1 and len(pairing.query_ids) > len(rows[1][1]):
        axes.axhline(pitch - bar / 2 - 0.055, color=MUTED, linewidth=0.8)
    middle = bar * (len(ranked) - 1) / 2
    names = [f"{shorten(name, LABEL_LENGTH)} ({len(positions)})" for name, positions in rows]
    axes.set_yticks([row * pitch + middle for row in range(len(rows))], labels=names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) * pitch - bar / 2 - 0.055, -bar / 2 - 0.055)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("change in bits per byte against base, % (left is better)")
    figure.legend(loc="outside upper left", ncols=columns)
    description = f"Change against base for {len(rows)} groups of texts and {len(ranked)} arms"
    return finish(figure, "subsets", description)


def certainty_chart(pairing: Pairing, looks: list[Look]) -> Chart | None:
    """σ_n against the bits saved, a panel an arm: does the selector know when it will help?"""
    panels = []
    for arm, look in zip(pairing.arms, looks, strict=True):
        reductions = arm.reductions_Q
        if reductions is None or arm.is_base:
            continue
        sigmas = np.array([arm.run.results[key].sigma for key in pairing.query_ids])
        known = np.isfinite(sigmas) & np.isfinite(reductions)
        if known.any():
            panels.append((arm, look, sigmas[known], 100.0 * reductions[known]))
    if not panels:
        return None
    columns = 2 if len(panels) in (1, 2, 4) else 3
    lines = -(-len(panels) // columns)
    figure = new_figure(0.5 + 2.5 * lines)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    many = sum(len(sigmas) for _, _, sigmas, _ in panels) > 8000
    said = []
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        arm, look, sigmas, saved = panels[place]
        axes.axhline(0.0, color=MUTED, linewidth=0.8)
        axes.plot(
            sigmas,
            saved,
            linestyle="none",
            marker=look.marker,
            markersize=3.2,
            color=look.color,
            alpha=0.6,
            markeredgewidth=0,
            rasterized=many,
        )
        rho = rank_correlation(sigmas, saved)
        statistic = f"ρ = {_signed(rho)}, n = {len(sigmas)}"
        said.append(f"{arm.label}: {statistic}")
        axes.set_title(shorten(arm.label, 22), fontsize=10.5, loc="left", pad=17)
        axes.annotate(
            statistic,
            (0.0, 1.0),
            xycoords="axes fraction",
            xytext=(0, 4),
            textcoords="offset points",
            color=MUTED,
            fontsize=9.5,
        )
        # A hidden panel cannot carry the ticks of its column.
        axes.tick_params(labelbottom=place + columns >= len(panels))
    figure.supxlabel("σₙ: uncertainty left after the last pick", fontsize=10.5)
    figure.supylabel("bits saved, % of base", fontsize=10.5)
    return finish(figure, "uncertainty", "Uncertainty against bits saved. " + "; ".join(said))


def cost_chart(pairing: Pairing) -> Chart | None:
    """Seconds per query, stacked by stage, a bar an arm."""
    means = {arm.label: mean_seconds(arm, pairing.query_ids) for arm in pairing.arms}
    stages = ordered_stages(means.values())
    if not stages:
        return None
    columns = _columns(stages)
    figure = new_figure(0.85 + 0.23 * -(-len(stages) // columns) + 0.34 * len(means))
    axes = figure.add_subplot()
    labels = [shorten(label, LABEL_LENGTH) for label in means]
    places = range(len(labels))
    starts = np.zeros(len(labels))
    for position, stage in enumerate(stages):
        widths = np.array([mean.get(stage, 0.0) for mean in means.values()])
        axes.barh(
            places,
            widths,
            left=starts,
            height=0.66,
            color=STAGES[min(position, len(STAGES) - 1)],
            edgecolor=MUTED,
            linewidth=0.5,
            label=shorten(stage, LABEL_LENGTH),
        )
        starts += widths
    for place, total in zip(places, starts, strict=True):
        axes.annotate(
            f"{seconds(total)} s",
            (total, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    axes.set_yticks(list(places), labels=labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.1)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds per query, mean")
    figure.legend(loc="outside upper left", ncols=columns)
    said = "; ".join(f"{k} {seconds(sum(v.values()))} s" for k, v in means.items())
    return finish(figure, "cost", f"Seconds per query by stage: {said}")


def subset_rows(pairing: Pairing) -> list[tuple[str, np.ndarray[Any, np.dtype[np.int64]]]]:
    """All texts first, then each subset by the best arm's ratio; positions of their queries."""
    everything = np.arange(len(pairing.query_ids), dtype=np.int64)
    names = list(dict.fromkeys(pairing.subsets))
    rows = [(name, pairing.rows_of(name)) for name in names]
    ranked = pairing.ranked
    if ranked:
        best = ranked[0]
        base = best.base_Q
        assert base is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [float(best.nats_QS[p, -1].sum() / base[p].sum()) for _, p in rows]
        order = np.argsort(np.nan_to_num(ratios, nan=np.inf), kind="stable")
        rows = [rows[position] for position in order]
    return [("all texts", everything), *(rows if len(rows) > 1 else [])]


def mean_seconds(arm: Arm, query_ids: tuple[str, ...]) -> dict[str, float]:
    """Mean seconds by stage over the compared queries; over all that say, when none were."""
    results = [arm.run.results[key] for key in query_ids if arm.points]
    if not results:
        results = list(arm.run.results.values())
    stages = dict.fromkeys(stage for result in results for stage in result.seconds)
    return {
        stage: sum(result.seconds.get(stage, 0.0) for result in results) / len(results)
        for stage in stages
    }


def _bases(pairing: Pairing) -> list[tuple[float, str]]:
    """Height of each base line and what to call it."""
    found: dict[str, tuple[float, str]] = {}
    for arm in pairing.arms:
        if arm.base_Q is not None and arm.run.model_key not in found:
            value = pairing.texts.bits_per_byte(arm.base_Q)
            name = "base" if pairing.same_model else f"base, {arm.run.model or 'unnamed'}"
            found[arm.run.model_key] = (value, shorten(name, LABEL_LENGTH))
    return list(found.values())


def _bounds(arm: Arm) -> tuple[list[float], list[float]] | None:
    lows, highs = [], []
    for point in arm.points:
        if point.ratio is None or not math.isfinite(point.ratio.low) or point.ratio.value <= 0.0:
            return None
        base = point.bits_per_byte / point.ratio.value
        lows.append(base * point.ratio.low)
        highs.append(base * point.ratio.high)
    return lows, highs


def _label_ends(axes: Any, ends: list[tuple[int, float, str, Look]]) -> None:
    """Names at the right edge, pushed apart where lines end close together."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    gap = 0.062
    order = sorted(ends, key=lambda end: end[1])
    heights = [(value - low) / (high - low) for _, value, _, _ in order]
    for position in range(1, len(heights)):
        heights[position] = max(heights[position], heights[position - 1] + gap)
    overshoot = heights[-1] - 1.0
    if overshoot > 0:
        heights = [height - overshoot for height in heights]
        for position in range(1, len(heights)):
            heights[position] = max(heights[position], heights[position - 1] + gap)
    for (step, value, text, look), height in zip(order, heights, strict=True):
        axes.annotate(
            text,
            (step, value),
            xycoords="data",
            xytext=(1.035, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": look.color,
                "linewidth": 1.0,
                "shrinkA": 2,
                "shrinkB": 3,
                "relpos": (0.0, 0.5),
            },
        )


def _columns(labels: Sequence[str]) -> int:
    """Columns of a legend that fits the width."""
    return max(1, min(6, len(labels), 80 // (6 + min(LABEL_LENGTH, max(map(len, labels))))))


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\u2212") if math.isfinite(value) else "–"
