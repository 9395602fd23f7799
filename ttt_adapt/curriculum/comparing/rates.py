"""Mean rewards over subsets of tasks, weighted, with intervals over tasks and seeds.

Where the targets are of several kinds, one number does not say everything: the mean over kinds
counts a rare kind as much as a frequent one, the mean by the targets' own shares counts what they
were asked for. Resamples draw tasks within each subset, and seeds.

Shape legend: S seeds, T tasks, R resamples.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.solving import Attempts, Estimate

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RewardGrid:
    """Mean reward of each task under each seed.

    Attributes:
        task_ids: T, sorted.
        subsets: each task's.
        values_ST: float64; NaN where no completion could be verified.
    """

    task_ids: tuple[str, ...]
    subsets: tuple[str, ...]
    values_ST: Floats


@dataclass(frozen=True, slots=True)
class Resampling:
    """How intervals are found: see :mod:`ttt_adapt.evaluation.solving`."""

    num_resamples: int = 2000
    seed: int = 0
    level: float = 0.95


def reward_grid(attempts: Sequence[Attempts]) -> RewardGrid:
    """Rewards by seed and task.

    Raises:
        UserError: no attempts, or seeds with different tasks.
    """
    by_seed: dict[int, dict[str, Attempts]] = {}
    for item in attempts:
        by_seed.setdefault(item.seed, {})[item.task_id] = item
    if not by_seed:
        raise UserError("expected attempts at one task or more, found none")
    rows = [by_seed[seed] for seed in sorted(by_seed)]
    tasks = sorted(rows[0])
    if any(sorted(row) != tasks for row in rows):
        raise UserError("expected the same tasks under every seed")
    values = [[_mean(row[task].known) for task in tasks] for row in rows]
    return RewardGrid(
        tuple(tasks),
        tuple(rows[0][task].subset for task in tasks),
        np.array(values, dtype=np.float64),
    )


def difference_grid(base: RewardGrid, other: RewardGrid) -> RewardGrid:
    """``other`` minus ``base``, task by task and seed by seed.

    Raises:
        UserError: the tasks, or the number of seeds, differ.
    """
    same = base.task_ids == other.task_ids and base.values_ST.shape == other.values_ST.shape
    if not same:
        raise UserError("expected the same tasks, and as many seeds, in both arms")
    return RewardGrid(base.task_ids, base.subsets, other.values_ST - base.values_ST)


def subset_shares(subsets: Iterable[str]) -> dict[str, float]:
    """Each subset's share, in order of appearance."""
    counts = Counter(subsets)
    return {name: count / counts.total() for name, count in counts.items()}


def equal_shares(subsets: Iterable[str]) -> dict[str, float]:
    """Every subset's weight in a mean over subsets."""
    names = list(dict.fromkeys(subsets))
    return dict.fromkeys(names, 1.0 / len(names))


def weighted_mean(
    grid: RewardGrid, weights: Mapping[str, float], resampling: Resampling
) -> Estimate:
    """The weighted mean over subsets of the mean over their tasks and the seeds.

    A task counts under every seed or under none. NaN where a subset with weight has no task.

    Args:
        weights: by subset; subsets that are not there weigh nothing.
    """
    known_T = ~np.isnan(grid.values_ST).any(axis=0)
    subsets = np.array(grid.subsets, dtype=object)
    places = {
        name: np.flatnonzero(known_T & (subsets == name))
        for name, weight in weights.items()
        if weight > 0.0
    }
    num_tasks = sum(len(place) for place in places.values())
    if not places or any(len(place) == 0 for place in places.values()):
        return Estimate(math.nan, math.nan, math.nan, num_tasks)
    means_S = sum(
        weights[name] * grid.values_ST[:, place].mean(axis=1) for name, place in places.items()
    )
    value = float(np.mean(means_S))
    if num_tasks == 1:
        return Estimate(value, math.nan, math.nan, 1)
    generator = np.random.default_rng(resampling.seed)
    num, num_seeds = resampling.num_resamples, len(grid.values_ST)
    drawn_RS = generator.multinomial(num_seeds, [1 / num_seeds] * num_seeds, num) / num_seeds
    totals_R = np.zeros(num)
    for name, place in places.items():
        drawn_RT = generator.multinomial(len(place), [1 / len(place)] * len(place), num)
        by_seed_RS = drawn_RT @ grid.values_ST[:, place].T / len(place)
        totals_R += weights[name] * (drawn_RS * by_seed_RS).sum(axis=1)
    edge = (1.0 - resampling.level) / 2.0
    low, high = np.quantile(totals_R, [edge, 1.0 - edge])
    return Estimate(value, float(low), float(high), num_tasks)


def _mean(rewards: Sequence[float]) -> float:
    return sum(rewards) / len(rewards) if rewards else math.nan
