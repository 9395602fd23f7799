"""Arms held against each other: rates with intervals, differences, what was forgotten, cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ttt_adapt.curriculum.comparing.arms import BASE, parse_arm
from ttt_adapt.curriculum.comparing.rates import (
    Resampling,
    RewardGrid,
    difference_grid,
    equal_shares,
    reward_grid,
    subset_shares,
    weighted_mean,
)
from ttt_adapt.curriculum.comparing.results import ArmRun, CurvePoint, RunCost
from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
from ttt_adapt.curriculum.selecting import Curriculum
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.evaluation.solving import Estimate, SolveRates, solve_rates


@dataclass(frozen=True, slots=True)
class Choice:
    """What an arm practised, of its first seed.

    Attributes:
        by_subset: tasks chosen, by source.
        on_target: share of them whose source is one of the targets'.
        first: ids of the first ten.
    """

    num_tasks: int
    noise_var: float
    by_subset: Mapping[str, int]
    on_target: float
    similarity: float
    diversity: float
    variance_left: float
    effective_rank: float
    warnings: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm against another on the same tasks and seeds, in mean reward.

    Attributes:
        by_target: subsets weighed by the targets' shares.
        by_subset: every subset weighed alike.
        others: on the tasks that show what was forgotten; ``None`` without any.
    """

    arm: str
    against: str
    by_target: Estimate
    by_subset: Estimate
    others: Estimate | None = None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over all seeds.

    Attributes:
        rates: over all tasks that are compared: pass@k, avg@n, maj@k.
        by_target: mean reward, subsets weighed by the targets' shares.
        by_subset: mean reward, every subset weighed alike.
        subsets: mean reward of each subset.
        others: mean reward on tasks of other kinds, every subset weighed alike; ``None`` without.
        other_subsets: of each of these.
        cost: mean of a run.
        curve: share of right completions in training, mean over seeds; by step.
        zero_signal: share of groups that taught nothing.
    """

    name: str
    rates: SolveRates
    by_target: Estimate
    by_subset: Estimate
    subsets: Mapping[str, Estimate]
    others: Estimate | None
    other_subsets: Mapping[str, Estimate]
    cost: RunCost
    num_seeds: int
    num_steps: int
    zero_signal: float
    num_absent: int
    curve: tuple[CurvePoint, ...] = ()
    curves: tuple[tuple[CurvePoint, ...], ...] = ()
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms, and each pair of them.

    Attributes:
        differences: every later arm against every earlier one, in the arms' order.
        target_shares: of the targets' sources.
        matched: whether every arm that practises drew as many completions.
        notes: what a reader must know first.
    """

    model: str
    arms: tuple[ArmSummary, ...]
    differences: tuple[Difference, ...]
    target_shares: Mapping[str, float]
    num_corpus: int
    num_targets: int
    num_evaluation: int
    num_others: int
    seeds: tuple[int, ...]
    num_samples: int
    rates_at: tuple[int, ...]
    level: float
    matched: bool = True
    notes: tuple[str, ...] = field(default=())

    def arm(self, name: str) -> ArmSummary:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def difference(self, arm: str, against: str) -> Difference | None:
        """``arm`` against an earlier one; ``None`` where there is none such."""
        pairs = {(item.arm, item.against): item for item in self.differences}
        return pairs.get((arm, against))


def summarize(
    runs: Sequence[ArmRun],
    targets: Sequence[Task],
    curricula: Mapping[str, Curriculum],
    settings: ComparisonSettings,
    *,
    num_corpus: int,
) -> Comparison:
    """What the runs of all arms and seeds come to.

    Args:
        runs: every arm under every seed.
        curricula: by arm, of its first seed.

    Raises:
        UserError: arms with different tasks or seeds.
    """
    resampling = Resampling(settings.num_resamples, 0, settings.level)
    shares = subset_shares(task.source for task in targets)
    by_arm = {name: [run for run in runs if run.arm == name] for name in settings.arms}
    grids = {
        name: reward_grid([item for run in found for item in run.evaluation])
        for name, found in by_arm.items()
    }
    other_grids = {
        name: reward_grid([item for run in found for item in run.others])
        for name, found in by_arm.items()
        if all(run.others for run in found)
    }
    shares = _present(shares, grids)
    arms = tuple(
        _summary(name, by_arm[name], grids[name], other_grids.get(name), curricula.get(name),
                 shares, settings, resampling)
        for name in settings.arms
    )  # fmt: skip
    differences = tuple(
        _difference(later, earlier, grids, other_grids, shares, resampling)
        for earlier, later in combinations(settings.arms, 2)
    )
    rollouts = {arm.cost.num_rollouts for arm in arms if parse_arm(arm.name).method}
    return Comparison(
        model=settings.model,
        arms=arms,
        differences=differences,
        target_shares=shares,
        num_corpus=num_corpus,
        num_targets=len(targets),
        num_evaluation=len(grids[settings.arms[0]].task_ids),
        num_others=len(next(iter(other_grids.values())).task_ids) if other_grids else 0,
        seeds=settings.seeds,
        num_samples=settings.sampling.num_samples,
        rates_at=settings.rates_at,
        level=settings.level,
        matched=len(rollouts) <= 1,
        notes=_notes(arms, rollouts, settings),
    )


def _present(shares: dict[str, float], grids: Mapping[str, RewardGrid]) -> dict[str, float]:
    """The targets' shares among subsets that are evaluated; all alike where none is."""
    there = set(next(iter(grids.values())).subsets)
    kept = {name: share for name, share in shares.items() if name in there}
    if not kept:
        return equal_shares(next(iter(grids.values())).subsets)
    return {name: share / sum(kept.values()) for name, share in kept.items()}


def _summary(
    name: str,
    runs: Sequence[ArmRun],
    grid: RewardGrid,
    others: RewardGrid | None,
    curriculum: Curriculum | None,
    shares: Mapping[str, float],
    settings: ComparisonSettings,
    resampling: Resampling,
) -> ArmSummary:
    attempts = [item for run in runs for item in run.evaluation]
    num_groups = sum(len(run.curve) for run in runs) * settings.training.prompts_per_step
    num_zero = sum(run.num_zero_signal for run in runs)
    return ArmSummary(
        name=name,
        rates=solve_rates(
            attempts,
            ks=settings.rates_at,
            num_resamples=settings.num_resamples,
            level=settings.level,
        ),
        by_target=weighted_mean(grid, shares, resampling),
        by_subset=weighted_mean(grid, equal_shares(grid.subsets), resampling),
        subsets=_each(grid, resampling),
        others=weighted_mean(others, equal_shares(others.subsets), resampling) if others else None,
        other_subsets=_each(others, resampling) if others else {},
        cost=_mean_cost([run.cost for run in runs]),
        num_seeds=len(runs),
        num_steps=max((len(run.curve) for run in runs), default=0),
        zero_signal=num_zero / num_groups if num_groups else 0.0,
        num_absent=sum(run.num_absent for run in runs),
        curve=_mean_curve([run.curve for run in runs]),
        curves=tuple(run.curve for run in runs),
        choice=_choice(curriculum, shares) if curriculum else None,
    )


def _each(grid: RewardGrid, resampling: Resampling) -> dict[str, Estimate]:
    names = dict.fromkeys(grid.subsets)
    return {name: weighted_mean(grid, {name: 1.0}, resampling) for name in names}


def _difference(
    arm: str,
    against: str,
    grids: Mapping[str, RewardGrid],
    other_grids: Mapping[str, RewardGrid],
    shares: Mapping[str, float],
    resampling: Resampling,
) -> Difference:
    grid = difference_grid(grids[against], grids[arm])
    others = None
    if arm in other_grids and against in other_grids:
        changed = difference_grid(other_grids[against], other_grids[arm])
        others = weighted_mean(changed, equal_shares(changed.subsets), resampling)
    return Difference(
        arm=arm,
        against=against,
        by_target=weighted_mean(grid, shares, resampling),
        by_subset=weighted_mean(grid, equal_shares(grid.subsets), resampling),
        others=others,
    )


def _choice(curriculum: Curriculum, shares: Mapping[str, float]) -> Choice:
    report = curriculum.report
    counts = Counter(task.source for task in curriculum.tasks)
    num_on_target = sum(count for name, count in counts.items() if name in shares)
    return Choice(
        num_tasks=len(curriculum.tasks),
        noise_var=curriculum.noise_var,
        by_subset=dict(counts.most_common()),
        on_target=num_on_target / len(curriculum.tasks),
        similarity=report.mean_similarity,
        diversity=report.diversity,
        variance_left=report.variance_left,
        effective_rank=report.effective_rank,
        warnings=report.warnings,
        first=tuple(task.id for task in curriculum.tasks[:10]),
    )


def _mean_cost(costs: Sequence[RunCost]) -> RunCost:
    num = len(costs)
    return RunCost(
        select_s=sum(cost.select_s for cost in costs) / num,
        train_s=sum(cost.train_s for cost in costs) / num,
        evaluate_s=sum(cost.evaluate_s for cost in costs) / num,
        num_rollouts=sum(cost.num_rollouts for cost in costs) // num,
        num_train_tokens=sum(cost.num_train_tokens for cost in costs) // num,
        num_evaluate_tokens=sum(cost.num_evaluate_tokens for cost in costs) // num,
    )


def _mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> tuple[CurvePoint, ...]:
    points = []
    for same in zip(*curves, strict=False):
        known = [point.pass_rate for point in same if point.pass_rate is not None]
        mean = sum(known) / len(known) if known else None
        points.append(CurvePoint(same[0].step, same[0].num_rollouts, mean))
    return tuple(points)


def _notes(
    arms: Sequence[ArmSummary], rollouts: set[int], settings: ComparisonSettings
) -> tuple[str, ...]:
    notes = []
    if len(rollouts) > 1:
        counts = ", ".join(f"{arm.name} {arm.cost.num_rollouts:,}" for arm in arms)
        notes.append(f"arms drew different numbers of completions in training: {counts}")
    if BASE not in settings.arms:
        notes.append("without the base arm nothing says what practising changed")
    if len(settings.seeds) < 2:
        notes.append("one seed: intervals say nothing of what another run would give")
    warned: dict[str, list[str]] = {}
    for arm in arms:
        total = arm.rates.num_absent + arm.num_absent
        if total:
            notes.append(
                f"{arm.name}: {total:,} completions could not be verified and count nowhere"
            )
        for warning in arm.choice.warnings if arm.choice else ():
            warned.setdefault(warning, []).append(arm.name)
    return (*notes, *(f"{', '.join(names)}: {text}" for text, names in warned.items()))
