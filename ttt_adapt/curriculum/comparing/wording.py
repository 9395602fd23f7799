"""A comparison in words and Markdown: no more than its intervals say."""

import math
from collections.abc import Sequence

from ttt_adapt.curriculum.comparing.arms import BASE
from ttt_adapt.curriculum.comparing.comparison import ArmSummary, Comparison, Difference
from ttt_adapt.evaluation.report.digits import NONE, count, seconds
from ttt_adapt.evaluation.solving import Estimate


def rate(estimate: Estimate | None) -> str:
    """``.614``."""
    if estimate is None or not math.isfinite(estimate.value):
        return NONE
    return f"{estimate.value:.3f}"


def interval(estimate: Estimate | None) -> str:
    """``.58 to .65``; empty where there is none."""
    if estimate is None or not math.isfinite(estimate.low):
        return ""
    return f"{estimate.low:.2f} to {estimate.high:.2f}".replace("-", "−")


def signed(estimate: Estimate | None) -> str:
    """``+.481``."""
    if estimate is None or not math.isfinite(estimate.value):
        return NONE
    return f"{estimate.value:+.3f}".replace("-", "−")


def with_interval(estimate: Estimate | None) -> str:
    """A rate and its interval in parentheses."""
    ends = interval(estimate)
    return rate(estimate) + (f" ({ends})" if ends else "")


def has_subsets(comparison: Comparison) -> bool:
    """Whether what is evaluated is of several kinds."""
    return len(comparison.arms[0].subsets) > 1


def ranked(comparison: Comparison) -> list[ArmSummary]:
    """Arms by their mean over subsets, best first."""
    return sorted(comparison.arms, key=lambda arm: -_comparable(arm.by_subset))


def conclusions(comparison: Comparison) -> list[str]:
    """What the comparison shows, a sentence each."""
    order = ranked(comparison)
    best = order[0]
    samples = comparison.num_samples
    where = "mean over kinds" if has_subsets(comparison) else f"avg@{samples}"
    alike = [arm.name for arm in order if rate(arm.by_subset) == rate(best.by_subset)]
    said = [f"Best by {where}: {' and '.join(alike)}, {with_interval(best.by_subset)}."]
    base = next((arm for arm in comparison.arms if arm.name == BASE), None)
    if base is not None and best.name != BASE:
        found = comparison.difference(best.name, BASE)
        if found is not None:
            said.append(
                f"Before practising: {with_interval(base.by_subset)}; the difference is "
                f"{_judged(found.by_subset)}."
            )
    for name, against in _questions(comparison):
        found = comparison.difference(name, against) or _turned(comparison, name, against)
        if found is not None:
            said.append(_sentence(found, comparison))
    return said


def comparison_as_markdown(comparison: Comparison) -> str:
    """The table of arms, with intervals, and what they show."""
    lines = [
        f"# {count(len(comparison.arms), 'arm')} on {count(comparison.num_evaluation, 'task')}",
        "",
        (
            f"{comparison.model}; {comparison.num_targets:,} targets, a corpus of "
            f"{comparison.num_corpus:,} tasks; {count(len(comparison.seeds), 'seed')}; "
            f"{comparison.num_samples} completions a task. Intervals: {comparison.level:.0%}, over "
            "tasks and seeds."
        ),
        "",
        *(f"- {sentence}" for sentence in conclusions(comparison)),
        "",
        *arms_table(comparison),
        "",
    ]
    if has_subsets(comparison):
        lines += [*subsets_table(comparison), ""]
    if any(arm.choice for arm in comparison.arms):
        lines += [*choices_table(comparison), ""]
    lines += [f"- {note}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def arms_table(comparison: Comparison) -> list[str]:
    """:func:`arms_rows` as Markdown."""
    return table(*arms_rows(comparison))


def arms_rows(comparison: Comparison, *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header, and one row an arm; ``brief``: what fits a terminal."""
    ks = [k for k in comparison.rates_at if k > 1]
    voted = [] if brief else ks
    several = has_subsets(comparison)
    header = ["arm"]
    header += (
        ["by targets' shares", "mean over kinds"] if several else [f"avg@{comparison.num_samples}"]
    )
    header += [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in voted]
    if comparison.num_others:
        header += ["other kinds"]
    header += ["rollouts", *([] if brief else ["tokens trained on"]), "s a run"]
    rows = []
    for arm in comparison.arms:
        cells = [arm.name]
        if several:
            cells += [with_interval(arm.by_target)]
        cells += [with_interval(arm.by_subset)]
        cells += [with_interval(arm.rates.pass_at.get(k)) for k in ks]
        cells += [with_interval(arm.rates.majority_at.get(k)) for k in voted]
        if comparison.num_others:
            cells += [with_interval(arm.others)]
        total_s = arm.cost.select_s + arm.cost.train_s + arm.cost.evaluate_s
        cells += [
            f"{arm.cost.num_rollouts:,}",
            *([] if brief else [f"{arm.cost.num_train_tokens:,}"]),
            seconds(total_s),
        ]
        rows.append(cells)
    return header, rows


def subsets_table(comparison: Comparison) -> list[str]:
    """:func:`subsets_rows` as Markdown."""
    return table(*subsets_rows(comparison))


def subsets_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header, and mean reward of each kind, one row an arm."""
    names = list(comparison.arms[0].subsets)
    shares = comparison.target_shares
    header = ["arm", *(f"{name} ({shares.get(name, 0.0):.0%} of targets)" for name in names)]
    rows = [
        [arm.name, *(with_interval(arm.subsets.get(name)) for name in names)]
        for arm in comparison.arms
    ]
    return header, rows


def choices_table(comparison: Comparison) -> list[str]:
    """What each arm practised."""
    header = ["arm", "tasks", "of the targets' kinds", "similarity", "diversity", "λ"]
    rows = []
    for arm in comparison.arms:
        if arm.choice is None:
            continue
        shown = f"{arm.choice.noise_var:g}" if arm.name.startswith("sift") else NONE
        rows.append(
            [
                arm.name,
                f"{arm.choice.num_tasks:,}",
                f"{arm.choice.on_target:.0%}",
                f"{arm.choice.similarity:.3f}",
                f"{arm.choice.diversity:.3f}",
                shown,
            ]
        )
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, a line each."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _comparable(estimate: Estimate) -> float:
    return estimate.value if math.isfinite(estimate.value) else -math.inf


def _questions(comparison: Comparison) -> list[tuple[str, str]]:
    """Pairs worth a sentence: each SIFT arm against each other way to choose."""
    names = [arm.name for arm in comparison.arms]
    sifts = [name for name in names if name.startswith("sift")]
    rest = [name for name in ("nearest", "round-robin", "random") if name in names]
    return [(sift, other) for sift in sifts for other in rest]


def _turned(comparison: Comparison, name: str, against: str) -> Difference | None:
    found = comparison.difference(against, name)
    if found is None:
        return None
    return Difference(name, against, _minus(found.by_target), _minus(found.by_subset))


def _minus(estimate: Estimate) -> Estimate:
    return Estimate(-estimate.value, -estimate.high, -estimate.low, estimate.num_tasks)


def _sentence(found: Difference, comparison: Comparison) -> str:
    said = f"{found.arm} against {found.against}: {_judged(found.by_subset)}"
    if not has_subsets(comparison):
        return said + "."
    return said + f" by mean over kinds, {_judged(found.by_target)} by the targets' shares."


def _judged(estimate: Estimate) -> str:
    ends = interval(estimate)
    if not ends:
        return signed(estimate)
    verdict = (
        "better"
        if estimate.low > 0.0
        else "worse"
        if estimate.high < 0.0
        else "no clear difference"
    )
    return f"{signed(estimate)} ({ends}), {verdict}"
