"""Weighted means over subsets, against loops; differences; what intervals must hold."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.curriculum.comparing.rates import (
    Resampling,
    difference_grid,
    equal_shares,
    reward_grid,
    subset_shares,
    weighted_mean,
)
from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.solving import Attempts

REWARD = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempts]:
    num_tasks, num_seeds = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    subsets = [draw(st.sampled_from("abc")) for _ in range(num_tasks)]
    return [
        Attempts(
            f"t{task}", tuple(draw(st.lists(REWARD, min_size=1, max_size=3))), (), seed, subset
        )
        for task, subset in enumerate(subsets)
        for seed in range(num_seeds)
    ]


def slow_mean(items: list[Attempts], weights: dict[str, float]) -> float:
    """By loops: seeds, then subsets, then tasks that count under every seed."""
    seeds = sorted({item.seed for item in items})
    counting = {
        item.task_id
        for item in items
        if all(other.known for other in items if other.task_id == item.task_id)
    }
    total = 0.0
    for seed in seeds:
        for subset, weight in weights.items():
            values = [
                sum(item.known) / len(item.known)
                for item in items
                if item.seed == seed and item.subset == subset and item.task_id in counting
            ]
            if not values:
                return math.nan
            total += weight * sum(values) / len(values)
    return total / len(seeds)


@settings(max_examples=60, deadline=None)
@given(items=attempts())
def test_weighted_mean_is_that_of_loops(items: list[Attempts]) -> None:
    grid = reward_grid(items)
    for weights in (equal_shares(grid.subsets), subset_shares(grid.subsets)):
        found = weighted_mean(grid, weights, Resampling(50))
        assert found.value == pytest.approx(slow_mean(items, weights), nan_ok=True)
        if math.isfinite(found.low):
            assert 0.0 <= found.low <= found.high <= 1.0


@settings(max_examples=30, deadline=None)
@given(items=attempts())
def test_nothing_differs_from_itself(items: list[Attempts]) -> None:
    grid = reward_grid(items)
    found = weighted_mean(difference_grid(grid, grid), equal_shares(grid.subsets), Resampling(50))
    assert math.isnan(found.value) or found.value == 0.0
    assert math.isnan(found.low) or (found.low, found.high) == (0.0, 0.0)


def test_intervals_are_those_of_a_normal_mean() -> None:
    """Many tasks of one kind: half an interval is 1.96 standard errors, within a tenth."""
    rewards = np.random.default_rng(0).integers(0, 2, size=400)
    items = [Attempts(f"t{i:03d}", (float(r),), subset="a") for i, r in enumerate(rewards)]
    found = weighted_mean(reward_grid(items), {"a": 1.0}, Resampling(4000))
    error = float(rewards.std()) / 20.0
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_a_rare_kind_weighs_as_much_in_the_mean_over_kinds() -> None:
    items = [Attempts(f"a{i}", (1.0,), subset="a") for i in range(9)]
    items.append(Attempts("b0", (0.0,), subset="b"))
    grid = reward_grid(items)
    assert weighted_mean(grid, equal_shares(grid.subsets), Resampling(10)).value == 0.5
    assert weighted_mean(grid, subset_shares(grid.subsets), Resampling(10)).value == 0.9


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="found none"):
        reward_grid([])
    with pytest.raises(UserError, match="the same tasks under every seed"):
        reward_grid([Attempts("a", (1.0,), seed=0), Attempts("b", (1.0,), seed=1)])
    one, two = (reward_grid([Attempts(name, (1.0,))]) for name in "ab")
    with pytest.raises(UserError, match="the same tasks, and as many seeds"):
        difference_grid(one, two)
