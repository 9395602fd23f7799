"""How often tasks are solved: pass@k, avg@k and maj@k, with intervals over tasks and seeds.

Several completions of each task were verified, under one or several seeds (of training and
sampling). pass@k is the chance that at least one of k completions is right, avg@k the mean reward
of one, maj@k the chance that the answer which most of k completions give is right.

Intervals are of the middle 95 % of resamples (percentile method; Efron and Tibshirani 1993,
chapter 13) that draw tasks and, where there are several, seeds, each with replacement: they say how
much would change with other tasks of the same kind and another run. Completions are not drawn: the
estimates already average over them.

Shape legend: S seeds, T tasks, R resamples; n completions, D subsets of k, A different answers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import SettingsError, UserError

Floats = NDArray[np.float64]
Rate = Callable[["Attempts"], float]

SOLVED = 1.0
"""The reward from which on a completion is right."""
VOTE_DRAWS = 256
"""Subsets that maj@k is averaged over at most."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of ``k`` of these completions, drawn without return, is right.

    1 − C(n − c, k) / C(n, k), as a product, which neither overflows nor loses digits: an unbiased
    estimate of 1 − (1 − p)^k, unlike what the share c/n put in for p gives.

    Args:
        num_samples: n, completions of one task.
        num_correct: c, those that are right.
        k: at most n.

    Raises:
        UserError: not 1 ≤ k ≤ n, or not 0 ≤ c ≤ n.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    if not 0 <= num_correct <= num_samples:
        raise UserError(
            f"expected 0 to {num_samples} correct completions of {num_samples}, found {num_correct}"
        )
    if not 1 <= k <= num_samples:
        raise UserError(
            f"pass@{k} needs 1 to n completions a task, found n = {num_samples}; sample more, or "
            "ask for a smaller k"
        )
    if num_samples - num_correct < k:
        return 1.0
    all_wrong = 1.0
    for drawn in range(k):
        all_wrong *= (num_samples - num_correct - drawn) / (num_samples - drawn)
    return 1.0 - all_wrong


def majority_at_k(
    answers: Sequence[str | None], rewards: Sequence[float], k: int, *, seed: int = 0
) -> float:
    """Chance that the answer which most of ``k`` completions give is right.

    The mean over subsets of k completions, all of them where they are few, else random ones: of the
    rewards of a subset's most frequent answer, tied ones averaged. A completion without an answer
    does not vote; no vote is wrong.

    Args:
        answers: each completion's, ``None`` without one; equal ones have the same text.
        rewards: each completion's.
        k: at most as many as there are.

    Raises:
        UserError: not as many answers as rewards, or not 1 ≤ k ≤ n.
    """
    if len(answers) != len(rewards) or not 1 <= k <= len(answers):
        raise UserError(
            f"maj@{k}: expected k or more answers and as many rewards, found {len(answers)} and "
            f"{len(rewards)}"
        )
    kinds = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    kinds_n = np.array([kinds[answer] for answer in answers])
    right_n = np.array(rewards, dtype=np.float64) >= SOLVED
    drawn_Dk = _subsets(len(answers), k, seed)
    votes_DA = np.zeros((len(drawn_Dk), len(kinds)))
    right_DA = np.zeros_like(votes_DA)
    rows_D1 = np.arange(len(drawn_Dk))[:, None]
    np.add.at(votes_DA, (rows_D1, kinds_n[drawn_Dk]), 1.0)
    np.add.at(right_DA, (rows_D1, kinds_n[drawn_Dk]), right_n[drawn_Dk])
    if None in kinds:
        votes_DA[:, kinds[None]] = 0.0
    leads_DA = (votes_DA == votes_DA.max(axis=1, keepdims=True)) & (votes_DA > 0)
    num_D = (votes_DA * leads_DA).sum(axis=1)
    shares_D = np.divide((right_DA * leads_DA).sum(axis=1), num_D, where=num_D > 0, out=0.0 * num_D)
    return float(shares_D.mean())


def _subsets(num: int, k: int, seed: int) -> NDArray[np.int64]:
    """All subsets of k of ``num``, one a row; random ones where there are more than 256."""
    if math.comb(num, k) <= VOTE_DRAWS:
        return np.array(list(combinations(range(num), k)))
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((VOTE_DRAWS, num)), axis=1)[:, :k]


@dataclass(frozen=True, slots=True)
class Attempts:
    """Verified completions of one task under one seed.

    Attributes:
        rewards: ``None`` where a completion could not be verified: it then counts nowhere.
        answers: final answers, for maj@k; empty if there are none to vote with.
        seed: of the run that they come from.
        subset: for reporting by family or data set.
    """

    task_id: str
    rewards: tuple[float | None, ...]
    answers: tuple[str | None, ...] = ()
    seed: int = 0
    subset: str = ""

    def __post_init__(self) -> None:
        if self.answers and len(self.answers) != len(self.rewards):
            raise UserError(
                f"task {self.task_id}: expected an answer for each of {len(self.rewards)} rewards, "
                f"found {len(self.answers)}"
            )

    @property
    def known(self) -> tuple[float, ...]:
        """Rewards of the completions that could be verified."""
        return tuple(reward for reward in self.rewards if reward is not None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and seeds, with its interval.

    Attributes:
        value: the mean over seeds of the mean over tasks; NaN where no task counts.
        low: lower end of the interval; NaN with one task.
        high: upper end.
        num_tasks: tasks that count: verified completions in every seed, enough for k.
    """

    value: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, slots=True)
class SolveRates:
    """What several completions of many tasks come to.

    Attributes:
        pass_at: pass@k by k.
        average: avg@n, the mean reward of one completion.
        majority_at: maj@k by k; empty without answers.
        num_tasks: T.
        num_seeds: S.
        num_completions: all.
        num_absent: those that could not be verified.
        level: of the intervals.
    """

    pass_at: Mapping[int, Estimate]
    average: Estimate
    majority_at: Mapping[int, Estimate] = field(default_factory=dict)
    num_tasks: int = 0
    num_seeds: int = 0
    num_completions: int = 0
    num_absent: int = 0
    level: float = 0.95


def solve_rates(
    attempts: Sequence[Attempts],
    *,
    ks: Sequence[int] = (1,),
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> SolveRates:
    """Rates over tasks and seeds.

    A task that has fewer than k verified completions under some seed is left out of that k's
    rates, and ``num_tasks`` of the estimate says how many are left.

    Args:
        attempts: one for each task and seed; every seed has the same tasks.
        ks: what to estimate pass@k and maj@k for.
        num_resamples: R.
        seed: of the resampling.
        level: of the intervals.

    Raises:
        UserError: no attempts, a task twice under one seed, or seeds with different tasks.
        SettingsError: a k below 1, ``num_resamples`` or ``level`` out of range.
    """
    _check_settings(ks, num_resamples, level)
    grid = _grid(attempts)
    resampling = (num_resamples, seed, level)
    pass_at, majority_at = {}, {}
    has_answers = all(item.answers for item in attempts)
    for k in ks:
        pass_at[k] = _estimate(_values(grid, partial(_pass, k=k)), resampling)
        if has_answers:
            majority_at[k] = _estimate(_values(grid, partial(_vote, k=k)), resampling)
    return SolveRates(
        pass_at=pass_at,
        average=_estimate(_values(grid, _mean), resampling),
        majority_at=majority_at,
        num_tasks=len(grid[0]),
        num_seeds=len(grid),
        num_completions=sum(len(item.rewards) for item in attempts),
        num_absent=sum(len(item.rewards) - len(item.known) for item in attempts),
        level=level,
    )


def solve_rate_difference(
    base: Sequence[Attempts],
    other: Sequence[Attempts],
    *,
    k: int = 1,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """pass@k of ``other`` minus that of ``base`` on the same tasks, with a paired interval.

    Tasks differ more than arms do, so a resample draws the same tasks, and the same seeds, of both.

    Raises:
        UserError: the arms have different tasks or seeds, and as :func:`solve_rates`.
        SettingsError: as :func:`solve_rates`.
    """
    _check_settings([k], num_resamples, level)
    one, two = _grid(base), _grid(other)
    if [[a.task_id for a in row] for row in one] != [[a.task_id for a in row] for row in two]:
        raise UserError("expected the same tasks, and as many seeds, in both arms")
    difference_ST = _values(two, partial(_pass, k=k)) - _values(one, partial(_pass, k=k))
    return _estimate(difference_ST, (num_resamples, seed, level))


def _check_settings(ks: Sequence[int], num_resamples: int, level: float) -> None:
    if any(k < 1 for k in ks):
        raise SettingsError(f"k must be at least 1, found {min(ks)}")
    if num_resamples < 1:
        raise SettingsError(f"num_resamples must be at least 1, found {num_resamples}")
    if not 0.0 < level < 1.0:
        raise SettingsError(f"level must be between 0 and 1, found {level}")


def _grid(attempts: Sequence[Attempts]) -> list[list[Attempts]]:
    """One row a seed, one column a task, both sorted."""
    if not attempts:
        raise UserError("expected attempts at one task or more, found none")
    by_seed: dict[int, dict[str, Attempts]] = {}
    for item in attempts:
        row = by_seed.setdefault(item.seed, {})
        if item.task_id in row:
            raise UserError(f"task {item.task_id} has two sets of attempts under seed {item.seed}")
        row[item.task_id] = item
    tasks = sorted(next(iter(by_seed.values())))
    for number, row in sorted(by_seed.items()):
        if sorted(row) != tasks:
            raise UserError(
                f"expected the same tasks under every seed; seed {number} has {len(row)}, another "
                f"{len(tasks)}"
            )
    return [[by_seed[number][task] for task in tasks] for number in sorted(by_seed)]


def _values(grid: list[list[Attempts]], rate: Rate) -> Floats:
    return np.array([[rate(item) for item in row] for row in grid], dtype=np.float64)


def _mean(item: Attempts) -> float:
    return sum(item.known) / len(item.known) if item.known else math.nan


def _pass(item: Attempts, k: int) -> float:
    known = item.known
    if len(known) < k:
        return math.nan
    return pass_at_k(len(known), sum(reward >= SOLVED for reward in known), k)


def _vote(item: Attempts, k: int) -> float:
    pairs = [(a, r) for a, r in zip(item.answers, item.rewards, strict=True) if r is not None]
    if len(pairs) < k:
        return math.nan
    return majority_at_k([a for a, _ in pairs], [r for _, r in pairs], k, seed=item.seed)


def _estimate(values_ST: Floats, resampling: tuple[int, int, float]) -> Estimate:
    num_resamples, seed, level = resampling
    # A task counts under every seed or under none, so that seeds stay comparable.
    kept_ST = values_ST[:, ~np.isnan(values_ST).any(axis=0)]
    num_seeds, num_tasks = kept_ST.shape
    if num_tasks == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    value = float(kept_ST.mean())
    if num_tasks == 1:
        return Estimate(value, math.nan, math.nan, 1)
    generator = np.random.default_rng(seed)
    drawn_tasks_RT = generator.multinomial(num_tasks, [1 / num_tasks] * num_tasks, num_resamples)
    drawn_seeds_RS = generator.multinomial(num_seeds, [1 / num_seeds] * num_seeds, num_resamples)
    means_R = np.einsum(
        "rs,st,rt->r",
        drawn_seeds_RS / num_seeds,
        kept_ST,
        drawn_tasks_RT / num_tasks,
        optimize=True,
    )
    low, high = np.quantile(means_R, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Estimate(value, float(low), float(high), num_tasks)
