"""Selecting by settings, for one query and for many, with adaptive stopping."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.config import SelectionSettings
from ttt_adapt.errors import SelectionError
from ttt_adapt.selection import adaptive_prefix, select, select_batch, sift
from ttt_adapt.types import Selection

METHODS = ["sift", "sift-fast", "uncertainty", "nearest", "nearest-distinct", "mmr", "random"]
Matrix = NDArray[np.float32]


def pool_and_queries(seed: int, num: int = 70, width: int = 20) -> tuple[Matrix, list[Matrix]]:
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((num, width)).astype(np.float32)
    pool /= np.linalg.norm(pool, axis=1, keepdims=True)
    pool[10:15] = pool[3]
    queries = [
        (pool[number % num] + rng.standard_normal(width).astype(np.float32) * 0.3)[None, :]
        for number in range(40)
    ]
    queries[7] = np.zeros_like(queries[7])
    return pool, queries


def assert_same(found: list[Selection], expected: list[Selection]) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.indices, two.indices)
        np.testing.assert_array_equal(one.posterior_var, two.posterior_var)
        np.testing.assert_array_equal(one.gains, two.gains)
        assert (one.prior_var, one.method) == (two.prior_var, two.method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("alpha", [None, 0.3])
def test_a_batch_equals_one_by_one(method: str, alpha: float | None) -> None:
    chosen = SelectionSettings.model_validate({"method": method, "num_select": 25, "alpha": alpha})
    pool, queries = pool_and_queries(0)
    seeds = list(range(40))
    expected = [
        select(pool, query, chosen, seed=seed) for query, seed in zip(queries, seeds, strict=True)
    ]
    assert_same(select_batch(pool, queries, chosen, seeds=seeds), expected)
    assert_same(select_batch([pool] * 40, queries, chosen, seeds=seeds), expected)
    assert_same(select_batch(torch.tensor(pool), queries, chosen, seeds=seeds), expected)
    assert expected[0].method == method


@pytest.mark.parametrize("noise_var", [1e-7, 1e-3, 0.1, 10.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_queries_in_step_equal_one_by_one(noise_var: float, dtype: str) -> None:
    chosen = SelectionSettings.model_validate(
        {"num_select": 45, "noise_var": noise_var, "dtype": dtype}
    )
    pool, queries = pool_and_queries(1, num=30, width=9)
    expected = [select(pool, query, chosen) for query in queries]
    assert_same(select_batch(pool, queries, chosen), expected)


def test_a_batch_of_queries_of_several_rows_and_of_none() -> None:
    pool, queries = pool_and_queries(2)
    chosen = SelectionSettings(num_select=9)
    mixed = [queries[0], np.concatenate(queries[1:4]), queries[4]]
    assert_same(select_batch(pool, mixed, chosen), [select(pool, query, chosen) for query in mixed])
    assert select_batch(pool, [], chosen) == []
    stacked = np.stack([pool, pool[::-1]])
    expected = [select(stacked[0], queries[0], chosen), select(stacked[1], queries[1], chosen)]
    assert_same(select_batch(stacked, queries[:2], chosen), expected)


def test_a_batch_names_the_query_at_fault() -> None:
    pool, queries = pool_and_queries(3)
    chosen = SelectionSettings(num_select=3)
    queries[2] = np.full_like(queries[2], np.nan)
    with pytest.raises(SelectionError, match="query 2: queries: expected finite values"):
        select_batch(pool, queries, chosen)
    with pytest.raises(SelectionError, match="query 1: candidates: expected a matrix"):
        select_batch([pool, pool[0]], queries[:2], chosen)
    with pytest.raises(SelectionError, match="expected one pool or 2 pools, one a query, found 3"):
        select_batch([pool] * 3, queries[:2], chosen)
    with pytest.raises(SelectionError, match="seeds: expected one for each of 2 queries, found 1"):
        select_batch(pool, queries[:2], chosen, seeds=[1])
    with pytest.raises(SelectionError, match="infinity in row 5"):
        broken = pool.copy()
        broken[5, 1] = np.inf
        select_batch(broken, queries[:2], chosen)


def made_up(variances: list[float]) -> Selection:
    values = np.array(variances)
    return Selection(np.arange(len(values)), values, -np.diff(values, prepend=1.0), 1.0, "made up")


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30).map(lambda v: sorted(v, reverse=True)),
    st.floats(1e-3, 10.0),
)
def test_the_prefix_is_the_longest_that_never_breaks_the_rule(
    variances: list[float], alpha: float
) -> None:
    found = adaptive_prefix(made_up(variances), alpha)
    keep = 0
    for number, variance in enumerate(variances, start=1):
        if np.sqrt(variance) * alpha * number > 1.0:
            break
        keep = number
    assert len(found.indices) == max(1, keep)
    np.testing.assert_array_equal(found.indices, np.arange(len(found.indices)))
    assert len(found.gains) == len(found.posterior_var) == len(found.indices)
    again = adaptive_prefix(found, alpha)
    assert len(again.indices) == len(found.indices)
    tighter = adaptive_prefix(made_up(variances), alpha * 2)
    assert len(tighter.indices) <= len(found.indices)


def test_stopping_is_for_good_and_relative_to_the_prior() -> None:
    # σ = .9, .8, .7, .1: at α = .5 the third breaks the rule, the fourth would satisfy it again.
    assert len(adaptive_prefix(made_up([0.81, 0.64, 0.49, 0.01]), 0.5).indices) == 2
    pool, queries = pool_and_queries(4)
    one = sift(pool, queries[0], num_select=30, alpha=1.5)
    several = sift(pool, np.repeat(queries[0], 5, axis=0) * 3.0, num_select=30)
    rows = adaptive_prefix(several, 0.3)
    relative = rows.posterior_var / rows.prior_var
    assert np.all(np.sqrt(relative) <= 1.0 / (0.3 * np.arange(1, len(relative) + 1)))
    assert 1 <= len(one.indices) < 30


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), "0.1"])
def test_alpha_is_checked(alpha: float) -> None:
    pool, queries = pool_and_queries(5)
    with pytest.raises(SelectionError, match="alpha: expected a positive finite number, found"):
        sift(pool, queries[0], num_select=3, alpha=alpha)
