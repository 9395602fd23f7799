"""pass@k, avg@k, maj@k against counting, and intervals that mean something."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttt_adapt.errors import SettingsError, UserError
from ttt_adapt.evaluation import (
    Attempts,
    majority_at_k,
    pass_at_k,
    solve_rate_difference,
    solve_rates,
)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, num))
    k = data.draw(st.integers(1, num))
    rewards = [1] * correct + [0] * (num - correct)
    subsets = list(combinations(rewards, k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(num, correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("num", "correct", "k"), [(10_000, 3, 5000), (10**6, 1, 10), (200, 199, 1)]
)
def test_large_numbers_lose_no_digits(num: int, correct: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(num - correct, k), math.comb(num, k))
    assert pass_at_k(num, correct, k) == pytest.approx(float(exact), rel=1e-9)


def test_edges_of_pass_at_k() -> None:
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 5, 1) == 1.0
    assert pass_at_k(5, 3, 3) == 1.0
    for values, message in (
        ((5, 6, 1), "0 to 5 correct completions of 5, found 6"),
        ((5, -1, 1), "found -1"),
        ((5, 1, 6), "pass@6 needs 1 to n completions a task, found n = 5"),
        ((5, 1, 0), "pass@0"),
    ):
        with pytest.raises(UserError, match=message):
            pass_at_k(*values)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over experiments is 1 − (1 − p)^k; that of the share put in for p is not."""
    generator = np.random.default_rng(0)
    correct = generator.binomial(10, 0.2, size=20_000)
    found = np.mean([pass_at_k(10, int(count), 5) for count in correct])
    truth = 1 - 0.8**5
    assert abs(found - truth) < 0.006
    assert abs(np.mean(1 - (1 - correct / 10) ** 5) - truth) > 0.02


def test_majorities() -> None:
    answers = ["a", "b", "a", None]
    assert majority_at_k(answers, [1.0, 0.0, 1.0, 0.0], 4) == 1.0
    assert majority_at_k(answers, [0.0, 1.0, 0.0, 0.0], 4) == 0.0
    assert majority_at_k(["a", "b"], [1.0, 0.0], 2) == 0.5, "a tie is drawn by lot"
    assert majority_at_k([None, None], [1.0, 1.0], 2) == 0.0
    assert majority_at_k(["a", "b", "c"], [1.0, 0.0, 0.0], 1) == pytest.approx(1 / 3)
    assert majority_at_k(answers, [1.0, 0.0, 1.0, 0.0], 3, seed=1) == majority_at_k(
        answers, [1.0, 0.0, 1.0, 0.0], 3, seed=1
    )
    assert majority_at_k(answers, [1.0, 0.0, 1.0, 0.0], 2) == pytest.approx(4 / 6)
    many = ["a", "b", "c"] * 8
    assert majority_at_k(many, [1.0, 0.0, 0.0] * 8, 5) == pytest.approx(1 / 3, abs=0.1)
    with pytest.raises(UserError, match="maj@3: expected k or more answers"):
        majority_at_k(["a"], [1.0], 3)


def attempts(rewards: Sequence[Sequence[float | None]], seed: int = 0) -> list[Attempts]:
    return [
        Attempts(f"t{n}", tuple(row), tuple("x" if r else "y" for r in row), seed)
        for n, row in enumerate(rewards)
    ]


def test_rates_over_tasks() -> None:
    rates = solve_rates(attempts([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), ks=(1, 2))
    assert rates.pass_at[1].value == pytest.approx(0.5)
    assert rates.pass_at[2].value == pytest.approx(2 / 3)
    assert rates.average.value == pytest.approx(0.5)
    assert rates.majority_at[2].value == pytest.approx((0.5 + 0 + 1) / 3)
    assert (rates.num_tasks, rates.num_seeds, rates.num_completions, rates.num_absent) == (
        3,
        1,
        6,
        0,
    )
    assert rates.pass_at[1].low <= rates.pass_at[1].value <= rates.pass_at[1].high


def test_absent_rewards_count_nowhere() -> None:
    rates = solve_rates(attempts([[1.0, None], [None, None], [0.0, 1.0]]), ks=(1, 2))
    assert rates.num_absent == 3
    assert rates.average.value == pytest.approx(0.75), "a task without a verified one is left out"
    assert (rates.average.num_tasks, rates.pass_at[1].num_tasks) == (2, 2)
    assert (rates.pass_at[2].value, rates.pass_at[2].num_tasks) == (1.0, 1)
    assert math.isnan(rates.pass_at[2].low)
    none = solve_rates(attempts([[None], [None]]))
    assert math.isnan(none.average.value)
    assert none.average.num_tasks == 0


def test_partial_rewards_average_but_do_not_pass() -> None:
    rates = solve_rates([Attempts("a", (0.5, 1.0)), Attempts("b", (0.5, 0.5))])
    assert rates.average.value == pytest.approx(0.625)
    assert rates.pass_at[1].value == pytest.approx(0.25)
    assert rates.majority_at == {}, "no answers, no votes"


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(60):
        chances = generator.uniform(size=40)
        rows = (generator.uniform(size=(40, 4)) < chances[:, None]).astype(float)
        rates = solve_rates(attempts(rows.tolist()), num_resamples=300, seed=trial)
        covered += rates.average.low <= 0.5 <= rates.average.high
    assert 49 <= covered <= 60


def test_seeds_that_differ_widen_the_interval() -> None:
    rows = [[1.0] if n % 2 else [0.0] for n in range(40)]
    better = [[1.0] if n % 4 else [0.0] for n in range(40)]
    alike = solve_rates([*attempts(rows, 0), *attempts(rows, 1)])
    apart = solve_rates([*attempts(rows, 0), *attempts(better, 1)])
    assert alike.num_seeds == apart.num_seeds == 2
    assert apart.average.value == pytest.approx(0.625)
    assert apart.average.high - apart.average.low > alike.average.high - alike.average.low


def test_differences_are_paired() -> None:
    """The same small gain on tasks of very different difficulty: sure in pairs, not apart."""
    generator = np.random.default_rng(2)
    hard = generator.uniform(0.0, 0.8, size=60)
    base = [[float(i < 10 * p) for i in range(10)] for p in hard]
    other = [[float(i < 10 * p + 1) for i in range(10)] for p in hard]
    difference = solve_rate_difference(attempts(base), attempts(other))
    assert difference.value == pytest.approx(0.1)
    assert difference.low > 0.05
    one, two = solve_rates(attempts(base)), solve_rates(attempts(other))
    assert one.pass_at[1].high > two.pass_at[1].low
    again = solve_rate_difference(attempts(base), attempts(other))
    assert again == difference


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "expected attempts at one task or more"),
        ([Attempts("a", (1.0,)), Attempts("a", (0.0,))], "two sets of attempts under seed 0"),
        ([Attempts("a", (1.0,)), Attempts("b", (0.0,), seed=1)], "same tasks under every seed"),
    ],
)
def test_attempts_that_do_not_belong_together(items: list[Attempts], message: str) -> None:
    with pytest.raises(UserError, match=message):
        solve_rates(items)


def test_other_mistakes() -> None:
    sound = [Attempts("a", (1.0, 0.0))]
    with pytest.raises(UserError, match="same tasks, and as many seeds, in both arms"):
        solve_rate_difference(sound, [Attempts("b", (1.0,))])
    with pytest.raises(UserError, match="an answer for each of 2 rewards, found 1"):
        Attempts("a", (1.0, 0.0), ("x",))
    for values in ({"ks": (0,)}, {"level": 1.0}, {"num_resamples": 0}):
        with pytest.raises(SettingsError):
            solve_rates(sound, **values)
