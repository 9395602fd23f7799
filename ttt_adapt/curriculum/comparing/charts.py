"""The figures of a comparison. Each function returns ``None`` when there is nothing to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ttt_adapt.curriculum.comparing.comparison import ArmSummary, Comparison
from ttt_adapt.evaluation.report.drawing import Chart, finish, new_figure
from ttt_adapt.evaluation.report.markup import shorten
from ttt_adapt.evaluation.report.palette import INK, MUTED, PAPER, STAGES, Look
from ttt_adapt.evaluation.solving import Estimate

LABEL_LENGTH = 30
MAX_SUBSETS = 24
SMOOTHED_STEPS = 5
"""A point of a learning curve is the mean of so many steps."""

Looks = Mapping[str, Look]


def arms_chart(comparison: Comparison, looks: Looks) -> Chart | None:
    """Mean reward and pass@k of every arm, with intervals."""
    several = len(comparison.arms[0].subsets) > 1
    groups: list[tuple[str, list[Estimate | None]]] = []
    if several:
        groups.append(("mean reward, by targets’ shares", [a.by_target for a in comparison.arms]))
        groups.append(("mean reward, mean over kinds", [a.by_subset for a in comparison.arms]))
    else:
        groups.append((f"avg@{comparison.num_samples}", [a.by_subset for a in comparison.arms]))
    for k in comparison.rates_at:
        if k > 1:
            groups.append((f"pass@{k}", [a.rates.pass_at.get(k) for a in comparison.arms]))
            groups.append((f"maj@{k}", [a.rates.majority_at.get(k) for a in comparison.arms]))
    groups = [(name, found) for name, found in groups if any(found)]
    return _bars("arms", groups, comparison.arms, looks, "share right (more is better)")


def subsets_chart(comparison: Comparison, looks: Looks) -> Chart | None:
    """Mean reward of every kind that is compared."""
    names = list(comparison.arms[0].subsets)[:MAX_SUBSETS]
    if len(names) < 2:
        return None
    groups = [
        (
            f"{name} ({comparison.target_shares.get(name, 0.0):.0%} of targets)",
            [arm.subsets.get(name) for arm in comparison.arms],
        )
        for name in names
    ]
    return _bars("kinds", groups, comparison.arms, looks, "share right, mean over tasks and seeds")


def others_chart(comparison: Comparison, looks: Looks) -> Chart | None:
    """Mean reward of kinds that are no target: what practising did to them."""
    names = list(comparison.arms[0].other_subsets)[:MAX_SUBSETS]
    if not names:
        return None
    groups = [("all of them", [arm.others for arm in comparison.arms])]
    if len(names) > 1:
        groups += [
            (name, [arm.other_subsets.get(name) for arm in comparison.arms]) for name in names
        ]
    return _bars("other-kinds", groups, comparison.arms, looks, "share right")


def curves_chart(comparison: Comparison, looks: Looks) -> Chart | None:
    """Share of right completions in training against rollouts: the mean over seeds, and each."""
    drawn = [arm for arm in comparison.arms if arm.curve]
    if not drawn:
        return None
    figure = new_figure(3.9)
    axes = figure.add_subplot()
    said = []
    for arm in drawn:
        look = looks[arm.name]
        for curve in arm.curves if len(arm.curves) > 1 else ():
            axes.plot(*_smoothed(curve), color=look.color, linewidth=0.7, alpha=0.35)
        places, rates = _smoothed(arm.curve)
        axes.plot(
            places,
            rates,
            color=look.color,
            linestyle=look.dashes,
            linewidth=1.9,
            label=shorten(arm.name, LABEL_LENGTH),
            zorder=3,
        )
        if rates:
            said.append(f"{arm.name} ends at {rates[-1]:.2f}")
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("right, of what was practised")
    figure.legend(loc="outside upper left", ncols=min(6, len(drawn)))
    return finish(figure, "learning", "Learning curves: " + "; ".join(said))


def choices_chart(comparison: Comparison, looks: Looks) -> Chart | None:
    """What each arm practised, by kind: the targets' kinds first."""
    arms = [arm for arm in comparison.arms if arm.choice is not None]
    names: dict[str, int] = {}
    for arm in arms:
        assert arm.choice is not None
        for name, number in arm.choice.by_subset.items():
            names[name] = names.get(name, 0) + number
    if not arms or len(names) < 2:
        return None
    targets = [name for name in comparison.target_shares if name in names]
    rest = sorted((name for name in names if name not in targets), key=lambda name: -names[name])
    figure = new_figure(1.0 + 0.34 * len(arms))
    axes = figure.add_subplot()
    rows = range(len(arms))
    starts = [0.0] * len(arms)
    parts = [*((name, [name]) for name in targets[:5]), ("other kinds", [*targets[5:], *rest])]
    for place, (label, members) in enumerate(parts):
        widths = [_share(arm, members) for arm in arms]
        last = place == len(parts) - 1
        axes.barh(
            rows,
            widths,
            left=starts,
            height=0.66,
            color=STAGES[0] if last else STAGES[-1 - place],
            edgecolor=MUTED,
            linewidth=0.5,
            label=shorten(label, LABEL_LENGTH),
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(list(rows), labels=[shorten(arm.name, LABEL_LENGTH) for arm in arms])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("share of the curriculum")
    figure.legend(loc="outside upper left", ncols=min(6, len(parts)))
    shares = "; ".join(f"{arm.name} {_share(arm, targets):.0%}" for arm in arms)
    return finish(figure, "choices", f"Share of the targets' kinds in what was practised: {shares}")


def cost_chart(comparison: Comparison) -> Chart | None:
    """Seconds of a run, stacked by stage."""
    stages = (("select", "select_s"), ("train", "train_s"), ("evaluate", "evaluate_s"))
    figure = new_figure(1.0 + 0.34 * len(comparison.arms))
    axes = figure.add_subplot()
    rows = range(len(comparison.arms))
    starts = [0.0] * len(comparison.arms)
    for place, (label, field) in enumerate(stages):
        widths = [float(getattr(arm.cost, field)) for arm in comparison.arms]
        axes.barh(
            rows,
            widths,
            left=starts,
            height=0.66,
            color=STAGES[2 * place],
            edgecolor=MUTED,
            linewidth=0.5,
            label=label,
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    names = [shorten(arm.name, LABEL_LENGTH) for arm in comparison.arms]
    axes.set_yticks(list(rows), labels=names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds a run, mean over seeds")
    figure.legend(loc="outside upper left", ncols=3)
    totals = "; ".join(f"{n} {total:.1f} s" for n, total in zip(names, starts, strict=True))
    return finish(figure, "cost", f"Seconds a run: {totals}")


def _bars(
    name: str,
    groups: Sequence[tuple[str, Sequence[Estimate | None]]],
    arms: Sequence[ArmSummary],
    looks: Looks,
    label: str,
) -> Chart | None:
    """Horizontal bars: a group a measure, a bar an arm, a line an interval."""
    if not groups:
        return None
    bar = min(0.15, max(0.1, 0.6 / len(arms)))
    pitch = bar * len(arms) + 0.14
    columns = max(1, min(6, len(arms)))
    figure = new_figure(0.75 + 0.23 * -(-len(arms) // columns) + len(groups) * pitch)
    axes = figure.add_subplot()
    for place, arm in enumerate(arms):
        look = looks[arm.name]
        centres = [row * pitch + place * bar for row in range(len(groups))]
        found = [estimates[place] for _, estimates in groups]
        axes.barh(
            centres,
            [math.nan if item is None else item.value for item in found],
            height=bar * 0.86,
            color=look.color,
            hatch=look.hatch,
            edgecolor=PAPER,
            linewidth=0,
            label=shorten(arm.name, LABEL_LENGTH),
            zorder=2,
        )
        for centre, item in zip(centres, found, strict=True):
            if item is not None and math.isfinite(item.low):
                axes.plot(
                    [item.low, item.high], [centre, centre], color=INK, linewidth=0.9, zorder=3
                )
    middle = bar * (len(arms) - 1) / 2
    titles = [shorten(title, LABEL_LENGTH + 6) for title, _ in groups]
    axes.set_yticks([row * pitch + middle for row in range(len(groups))], labels=titles)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(groups) * pitch - bar / 2 - 0.07, -bar / 2 - 0.07)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel(label)
    figure.legend(loc="outside upper left", ncols=columns)
    said = "; ".join(
        f"{arm.name} {item.value:.3f}"
        for arm, item in zip(arms, groups[0][1], strict=True)
        if item is not None
    )
    return finish(figure, name, f"{groups[0][0]}: {said}")


def _smoothed(curve: Sequence[Any]) -> tuple[list[float], list[float]]:
    known = [point for point in curve if point.pass_rate is not None]
    size = min(SMOOTHED_STEPS, max(1, len(known) // 4))
    places, rates = [], []
    for end in range(size, len(known) + 1):
        window = known[end - size : end]
        places.append(float(window[-1].num_rollouts))
        rates.append(sum(point.pass_rate for point in window) / size)
    return places, rates


def _share(arm: ArmSummary, names: Sequence[str]) -> float:
    assert arm.choice is not None
    return sum(arm.choice.by_subset.get(name, 0) for name in names) / arm.choice.num_tasks
