"""Paired bootstrap: against a slow obvious loop, and what must always hold."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.errors import SettingsError, UserError
from ttt_adapt.evaluation.bootstrap import paired_bootstrap, resample_sums
from ttt_adapt.types import Score

Arm = list[Score]


def arms(num: int, *, seed: int = 0, gain: float = 0.1, noise: float = 0.02) -> tuple[Arm, Arm]:
    """Texts of very different length; the other arm needs ``gain`` nats a byte less, with noise."""
    generator = np.random.default_rng(seed)
    num_bytes = generator.integers(50, 5000, num)
    rates = generator.normal(1.5, 0.4, num)
    others = rates - generator.normal(gain, noise, num)
    make = [
        [Score(float(r * b), int(b), int(b)) for r, b in zip(arm, num_bytes, strict=True)]
        for arm in (rates, others)
    ]
    return make[0], make[1]


scores = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 10**6)), min_size=1, max_size=20
).filter(lambda rows: any(row[2] for row in rows))


@settings(deadline=None, max_examples=50)
@given(scores)
def test_identical_arms_do_not_differ(rows: list[tuple[float, float, int]]) -> None:
    arm = [Score(nats, num_bytes, 1) for nats, _, num_bytes in rows]
    result = paired_bootstrap(arm, arm, num_resamples=50)
    assert result.difference == 0.0
    assert (result.wins, result.losses, result.ties) == (0, 0, result.num_texts)
    assert result.num_texts == sum(score.num_bytes > 0 for score in arm)
    if result.num_texts > 1:
        assert (result.low, result.high, result.share_not_better) == (0.0, 0.0, 1.0)


@settings(deadline=None, max_examples=50)
@given(scores)
def test_swapping_the_arms_turns_the_sign(rows: list[tuple[float, float, int]]) -> None:
    one = [Score(nats, num_bytes, 1) for nats, _, num_bytes in rows]
    two = [Score(nats, num_bytes, 1) for _, nats, num_bytes in rows]
    there = paired_bootstrap(one, two, num_resamples=50)
    back = paired_bootstrap(two, one, num_resamples=50)
    assert there.difference == -back.difference
    assert (there.wins, there.losses) == (back.losses, back.wins)
    assert there.wins + there.losses + there.ties == there.num_texts
    if there.num_texts > 1:
        assert there.low <= there.high
        assert there.low == pytest.approx(-back.high, rel=1e-9, abs=1e-9)


def test_equals_an_obvious_loop() -> None:
    base, other = arms(23)
    result = paired_bootstrap(base, other, num_resamples=300, seed=4)
    generator = np.random.default_rng(4)
    draws = generator.integers(23, size=(300, 23))
    differences, ratios = [], []
    for drawn in draws:
        num_bytes = sum(base[i].num_bytes for i in drawn)
        before = sum(base[i].nats for i in drawn) / math.log(2) / num_bytes
        after = sum(other[i].nats for i in drawn) / math.log(2) / num_bytes
        differences.append(after - before)
        ratios.append(after / before)
    assert [result.low, result.high] == pytest.approx(
        list(np.quantile(differences, [0.025, 0.975]))
    )
    assert [result.ratio_low, result.ratio_high] == pytest.approx(
        list(np.quantile(ratios, [0.025, 0.975]))
    )
    whole = sum(score.nats for score in other) / sum(score.num_bytes for score in base)
    assert result.other == pytest.approx(whole / math.log(2))
    assert result.ratio == pytest.approx(result.other / result.base)


def test_pairing_finds_what_separate_intervals_could_not() -> None:
    base, other = arms(40, gain=0.05)
    result = paired_bootstrap(base, other)
    assert result.low < result.difference < result.high < 0.0
    assert result.share_not_better == 0.0
    spread = float(np.std([score.bits_per_byte for score in base]) / math.sqrt(40))
    assert result.high - result.low < spread


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        base, other = arms(40, seed=seed, gain=0.1, noise=0.1)
        result = paired_bootstrap(base, other, num_resamples=200, level=0.9, seed=seed)
        covered += result.low <= -0.1 / math.log(2) <= result.high
    assert 160 <= covered <= 196


def test_seeded() -> None:
    base, other = arms(30)
    one = paired_bootstrap(base, other, seed=1, num_resamples=100)
    assert one == paired_bootstrap(base, other, seed=1, num_resamples=100)
    assert one != paired_bootstrap(base, other, seed=2, num_resamples=100)


def test_how_many_draws_are_held_does_not_matter() -> None:
    columns = np.random.default_rng(0).normal(size=(9, 3))
    strata = np.array([0, 1, 0, 1, 1, 2, 0, 0, 1])
    whole = resample_sums(columns, strata, num_resamples=50, seed=3)
    for max_draws in (1, 7, 100):
        part = resample_sums(columns, strata, num_resamples=50, seed=3, max_draws=max_draws)
        assert np.allclose(part, whole, rtol=1e-12)


def test_strata_keep_their_sizes() -> None:
    columns = np.ones((7, 1))
    strata = np.array([0, 0, 1, 2, 2, 2, 1])
    sums = resample_sums(columns, strata, num_resamples=20, seed=0)
    assert sums.shape == (20, 3, 1)
    assert (sums[..., 0] == [2, 2, 3]).all()


def test_stratifying_removes_the_variance_between_subsets() -> None:
    """Two kinds of text, each with its own constant gain: within a stratum nothing varies."""
    base = [Score(100.0, 100, 1)] * 10 + [Score(200.0, 100, 1)] * 10
    other = [Score(90.0, 100, 1)] * 10 + [Score(100.0, 100, 1)] * 10
    subsets = ["a"] * 10 + ["b"] * 10
    plain = paired_bootstrap(base, other)
    stratified = paired_bootstrap(base, other, subsets=subsets)
    assert plain.high - plain.low > 0.1
    assert stratified.low == pytest.approx(stratified.high)
    assert stratified.low == pytest.approx(stratified.difference)


def test_weights_average_the_subsets_own_ratios() -> None:
    base = [Score(100.0, 100, 1), Score(100.0, 100, 1), Score(4000.0, 1000, 1)]
    other = [Score(50.0, 100, 1), Score(50.0, 100, 1), Score(3000.0, 1000, 1)]
    result = paired_bootstrap(base, other, subsets=["a", "a", "b"], weights={"a": 0.75, "b": 0.25})
    assert result.base == pytest.approx((0.75 * 1 + 0.25 * 4) / math.log(2))
    assert result.other == pytest.approx((0.75 * 0.5 + 0.25 * 3) / math.log(2))


def test_one_text_has_no_interval() -> None:
    result = paired_bootstrap(
        [Score(2.0, 1, 1), Score(0, 0, 0)], [Score(1.0, 1, 1), Score(0, 0, 0)]
    )
    assert (result.ratio, result.num_texts, result.wins) == (0.5, 1, 1)
    assert math.isnan(result.low) and math.isnan(result.high)
    assert math.isnan(result.share_not_better)


def test_a_perfect_base_has_no_ratio() -> None:
    perfect = [Score(0.0, 5, 1)] * 3
    result = paired_bootstrap(perfect, perfect, num_resamples=10)
    assert math.isnan(result.ratio)
    assert result.difference == 0.0


def test_refusals() -> None:
    base, other = arms(3)
    with pytest.raises(UserError, match="the same texts in both arms: 3 and 2"):
        paired_bootstrap(base, other[:2])
    with pytest.raises(UserError, match="text 1 has .* bytes in one arm and 1 in the other"):
        paired_bootstrap(base, [other[0], Score(1.0, 1, 1), other[2]])
    with pytest.raises(UserError, match="text 0 has nan and .* nats: leave texts without"):
        paired_bootstrap([Score(math.nan, base[0].num_bytes, 1), *base[1:]], other)
    with pytest.raises(UserError, match="at least one text with bytes"):
        paired_bootstrap([Score(0.0, 0, 0)], [Score(0.0, 0, 0)])
    with pytest.raises(UserError, match="one subset a text: 3 texts, 1 subsets"):
        paired_bootstrap(base, other, subsets=["a"])
    with pytest.raises(UserError, match="no weight for b"):
        paired_bootstrap(base, other, subsets=["a", "b", "a"], weights={"a": 1.0})
    with pytest.raises(UserError, match="weights are by subset: pass subsets too"):
        paired_bootstrap(base, other, weights={"a": 1.0})
    with pytest.raises(SettingsError, match="num_resamples must be at least 1, found 0"):
        paired_bootstrap(base, other, num_resamples=0)
    with pytest.raises(SettingsError, match=r"level must be between 0 and 1, found 95"):
        paired_bootstrap(base, other, level=95)
