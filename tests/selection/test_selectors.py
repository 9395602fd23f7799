"""Every selector against the invariants that all share, and each one's own definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ttt_adapt.selection import (
    greedy_gap,
    mmr,
    nearest,
    nearest_distinct,
    posterior_variance,
    random,
    sift,
    sift_fast,
    uncertainty,
)
from ttt_adapt.types import Selection

Selector = Callable[..., Selection]
SELECTORS: dict[str, Selector] = {
    "sift": sift,
    "sift-fast": sift_fast,
    "uncertainty": uncertainty,
    "nearest": nearest,
    "nearest-distinct": nearest_distinct,
    "mmr": mmr,
    "random": random,
}
MAY_REPEAT = {"sift", "sift-fast", "uncertainty"}
every_selector = pytest.mark.parametrize("name", SELECTORS)


def problem(
    num: int = 40, width: int = 12, rows: int = 1, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((num, width))
    pool /= np.linalg.norm(pool, axis=1, keepdims=True)
    queries = rng.standard_normal((rows, width)) + pool[0]
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    return pool.astype(np.float32), queries.astype(np.float32)


@every_selector
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_shape_names_and_posterior(name: str, rows: int) -> None:
    pool, queries = problem(rows=rows)
    found = SELECTORS[name](pool, queries, num_select=10, noise_var=0.05)
    assert found.method == name
    assert found.approximate == (name == "sift-fast")
    assert found.indices.dtype == np.int64 and found.indices.shape == (10,)
    assert found.posterior_var.dtype == found.gains.dtype == np.float64
    assert ((found.indices >= 0) & (found.indices < 40)).all()
    reference = posterior_variance(pool, queries, found.indices, 0.05)
    np.testing.assert_allclose(found.posterior_var, reference, rtol=1e-9)
    assert found.prior_var == pytest.approx(rows, rel=1e-6)


@every_selector
def test_repeatable_stateless_and_pure(name: str) -> None:
    pool, queries = problem(rows=2)
    kept = pool.copy(), queries.copy()
    first = SELECTORS[name](pool, queries, num_select=12)
    SELECTORS[name](*problem(seed=9), num_select=5)
    second = SELECTORS[name](pool, queries, num_select=12)
    np.testing.assert_array_equal(first.indices, second.indices)
    np.testing.assert_array_equal(first.posterior_var, second.posterior_var)
    np.testing.assert_array_equal(pool, kept[0])
    np.testing.assert_array_equal(queries, kept[1])


@every_selector
def test_a_longer_selection_begins_with_the_shorter(name: str) -> None:
    pool, queries = problem()
    short = SELECTORS[name](pool, queries, num_select=7)
    long = SELECTORS[name](pool, queries, num_select=25)
    np.testing.assert_array_equal(long.indices[:7], short.indices)
    np.testing.assert_allclose(long.posterior_var[:7], short.posterior_var, rtol=1e-10)


@every_selector
def test_more_picks_than_candidates(name: str) -> None:
    pool, queries = problem(num=6)
    found = SELECTORS[name](pool, queries, num_select=15)
    if name in MAY_REPEAT:
        assert len(found.indices) == 15
        once = SELECTORS[name](pool, queries, num_select=15, allow_repeats=False)
        assert sorted(once.indices.tolist()) == list(range(6))
    else:
        assert sorted(found.indices.tolist()) == list(range(6))


@every_selector
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_tensors_equal_arrays(name: str, kind: type[np.floating[Any]]) -> None:
    pool, queries = (part.astype(kind) for part in problem(rows=2))
    arrays = SELECTORS[name](pool, queries, num_select=9)
    tensors = SELECTORS[name](torch.tensor(pool), torch.tensor(queries), num_select=9)
    np.testing.assert_array_equal(arrays.indices, tensors.indices)
    np.testing.assert_array_equal(arrays.posterior_var, tensors.posterior_var)


@pytest.mark.parametrize("name", [name for name in SELECTORS if name != "random"])
@pytest.mark.parametrize("rows", [1, 4])
def test_shuffling_candidates_shuffles_picks(name: str, rows: int) -> None:
    pool, queries = problem(num=120, width=33, rows=rows, seed=2)
    order = np.random.default_rng(3).permutation(len(pool))
    plain = SELECTORS[name](pool, queries, num_select=30)
    shuffled = SELECTORS[name](pool[order], queries, num_select=30)
    np.testing.assert_array_equal(order[shuffled.indices], plain.indices)
    np.testing.assert_array_equal(shuffled.posterior_var, plain.posterior_var)


@pytest.mark.parametrize("name", [name for name in SELECTORS if name != "random"])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_of_equal_candidates_the_first_is_picked(name: str, kind: type[np.floating[Any]]) -> None:
    pool, queries = problem(num=31, width=37, seed=4)
    copies = np.concatenate([pool] * 5).astype(kind)
    found = SELECTORS[name](copies, queries, num_select=20)
    picks = found.indices.tolist()
    for step, pick in enumerate(picks):
        same = set(range(pick % 31, len(copies), 31))
        if name in MAY_REPEAT:
            assert pick < 31
        else:
            assert pick == min(same - set(picks[:step]))


@every_selector
def test_a_single_candidate_and_a_zero_query(name: str) -> None:
    pool, queries = problem()
    only = SELECTORS[name](pool[:1], queries, num_select=1)
    assert only.indices.tolist() == [0]
    nothing = SELECTORS[name](pool, np.zeros_like(queries), num_select=5)
    assert nothing.prior_var == 0.0
    assert nothing.posterior_var.tolist() == [0.0] * 5
    zeros = SELECTORS[name](np.zeros_like(pool), queries, num_select=1)
    assert zeros.gains.tolist() == [0.0]


def test_nearest_ranks_by_the_largest_inner_product() -> None:
    pool, queries = problem(rows=3)
    relevance = (pool.astype(np.float64) @ queries.T.astype(np.float64)).max(axis=1)
    found = nearest(pool, queries, num_select=40)
    np.testing.assert_array_equal(found.indices, np.argsort(-relevance, kind="stable"))


def test_nearest_distinct_skips_what_is_too_similar() -> None:
    pool, queries = problem(seed=5)
    doubled = np.repeat(pool, 2, axis=0)
    found = nearest_distinct(doubled, queries, num_select=40, threshold=0.99)
    assert len(found.indices) == 40 and (found.indices % 2 == 0).all()
    similarity = pool[found.indices // 2] @ pool[found.indices // 2].T
    assert similarity[~np.eye(40, dtype=bool)].max() <= 0.99
    everything = nearest_distinct(doubled, queries, num_select=80, threshold=1.0)
    plain = nearest(doubled, queries, num_select=80)
    np.testing.assert_array_equal(everything.indices, plain.indices)
    assert len(nearest_distinct(doubled, queries, num_select=9, threshold=0.0).indices) < 9


def test_mmr_is_its_formula() -> None:
    pool, queries = problem(rows=2, seed=6)
    lengths = np.linspace(0.5, 2.0, len(pool))[:, None]
    found = mmr(pool * lengths.astype(np.float32), queries, num_select=12, relevance=0.6)
    picked: list[int] = []
    for _ in range(12):
        scores = 0.6 * (pool @ queries.T).max(axis=1)
        if picked:
            scores -= 0.4 * (pool @ pool[picked].T).max(axis=1)
        scores[picked] = -np.inf
        picked.append(int(scores.argmax()))
    assert found.indices.tolist() == picked
    alone = mmr(pool, queries, num_select=40, relevance=1.0)
    np.testing.assert_array_equal(alone.indices, nearest(pool, queries, num_select=40).indices)


def test_uncertainty_ignores_the_query_and_takes_the_largest_variance() -> None:
    pool, queries = problem(seed=7)
    first = uncertainty(pool, queries, num_select=15, noise_var=0.1)
    second = uncertainty(pool, queries[:, ::-1].copy(), num_select=15, noise_var=0.1)
    np.testing.assert_array_equal(first.indices, second.indices)
    rows = pool.astype(np.float64)
    for step, pick in enumerate(first.indices.tolist()):
        picks = rows[first.indices[:step]]
        gram = picks @ picks.T + 0.1 * np.eye(step)
        cross = picks @ rows.T
        variances = np.sum(rows**2, axis=1) - np.sum(cross * np.linalg.solve(gram, cross), axis=0)
        assert variances[pick] >= variances.max() - 1e-12


def test_random_follows_its_seed() -> None:
    pool, queries = problem()
    picks = [random(pool, queries, num_select=20, seed=seed).indices.tolist() for seed in (1, 1, 2)]
    assert picks[0] == picks[1] != picks[2]
    assert len(set(picks[0])) == 20


def test_fast_equals_exact_where_candidates_do_not_complement_each_other() -> None:
    pool = np.diag(np.linspace(1.0, 2.0, 12))
    query = np.linspace(1.0, 0.3, 12)[None, :]
    exact = sift(pool, query, num_select=30, noise_var=0.1)
    fast = sift_fast(pool, query, num_select=30, noise_var=0.1)
    np.testing.assert_array_equal(fast.indices, exact.indices)
    assert greedy_gap(fast, exact) == 1.0


def test_fast_reports_a_gap_on_generic_data() -> None:
    pool, queries = problem(num=200, width=48, seed=8)
    exact = sift(pool, queries, num_select=30)
    fast = sift_fast(pool, queries, num_select=30)
    assert fast.indices[0] == exact.indices[0]
    ratio = fast.posterior_var[-1] / exact.posterior_var[-1]
    assert greedy_gap(fast, exact) == pytest.approx(ratio)
    assert 0.9 < ratio < 3.0


@pytest.mark.parametrize("width", [3, 16, 64])
def test_sift_leaves_least_variance_after_one_pick(width: int) -> None:
    pool, queries = problem(num=80, width=width, rows=2, seed=11)
    best = sift(pool, queries, num_select=1).posterior_var[0]
    for name in SELECTORS:
        other = SELECTORS[name](pool, queries, num_select=1).posterior_var[0]
        assert best <= other + 1e-12
