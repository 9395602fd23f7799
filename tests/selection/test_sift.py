"""SIFT against a float64 brute force, against the full covariance matrix, and across precisions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.selection import posterior_variance, sift
from ttt_adapt.types import Selection

Matrix = NDArray[np.float64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Matrix, Matrix, int, float]:
    """Pools of every shape, with duplicates, zero rows, opposite rows and uneven lengths."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num, rows = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    width = draw(st.sampled_from([1, 2, 3, 5, 8, 17, 40]))
    pool = rng.standard_normal((num, width))
    queries = rng.standard_normal((rows, width))
    if draw(st.booleans()):
        pool /= np.linalg.norm(pool, axis=1, keepdims=True)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    for _ in range(draw(st.integers(0, 3))):
        source, target = rng.integers(num, size=2)
        pool[target] = pool[source] * draw(st.sampled_from([1.0, -1.0, 0.0, 2.5]))
    noise_var = draw(st.sampled_from([1e-13, 1e-8, 1e-4, 0.01, 0.3, 10.0, 1e6]))
    return pool, queries, draw(st.integers(1, 9)), noise_var


def brute_force_gains(pool: Matrix, queries: Matrix, picked: list[int], noise_var: float) -> Matrix:
    """The fall of the total posterior variance for every candidate, by one solve each."""

    def total(order: list[int]) -> float:
        picks = pool[order]
        covariance = picks @ queries.T
        gram = picks @ picks.T + noise_var * np.eye(len(order))
        return float(np.sum(queries**2) - np.sum(covariance * np.linalg.solve(gram, covariance)))

    before = total(picked) if picked else float(np.sum(queries**2))
    return np.array([before - total([*picked, one]) for one in range(len(pool))])


def full_matrix_picks(
    pool: Matrix, queries: Matrix, num_select: int, noise_var: float
) -> list[int]:
    """Variance-based transductive learning on the whole (K+M)² covariance matrix."""
    joint = np.concatenate([pool, queries])
    covariance = joint @ joint.T
    num = len(pool)
    picked = []
    for _ in range(num_select):
        variances = np.diag(covariance)
        scores = (covariance[num:, :num] ** 2).sum(axis=0) / (variances[:num] + noise_var)
        best = int(scores.argmax())
        picked.append(best)
        column = covariance[:, best].copy()
        covariance -= np.outer(column, column) / (column[best] + noise_var)
    return picked


def assert_exact_at_tiny_noise(found: Selection, prior: float) -> None:
    """A solve tells nothing of single gains here; what must hold still does."""
    assert np.isfinite(found.gains).all() and np.all(found.gains >= 0.0)
    assert found.posterior_var[-1] <= found.prior_var
    assert found.prior_var == pytest.approx(prior, rel=1e-12)


def assert_greedy(found: Selection, pool: Matrix, queries: Matrix, noise_var: float) -> None:
    """Every pick is the best there is, up to what a solve of that condition can tell."""
    prior = float(np.sum(queries**2))
    if noise_var < 1e-10:
        return assert_exact_at_tiny_noise(found, prior)
    slack = 1e-12 * prior * (1.0 + float(np.max(np.sum(pool**2, axis=1))) / noise_var)
    for step, pick in enumerate(found.indices.tolist()):
        gains = brute_force_gains(pool, queries, found.indices[:step].tolist(), noise_var)
        assert gains[pick] >= gains.max() - slack
        twins = np.flatnonzero((pool == pool[pick]).all(axis=1))
        assert pick == twins[0]
        assert abs(found.gains[step] - gains[pick]) <= slack


@settings(deadline=None, max_examples=150)
@given(problems())
def test_float64_matches_brute_force(problem: tuple[Matrix, Matrix, int, float]) -> None:
    pool, queries, num_select, noise_var = problem
    found = sift(pool, queries, num_select=num_select, noise_var=noise_var)
    assert found.indices.dtype == np.int64
    assert found.posterior_var.dtype == found.gains.dtype == np.float64
    assert len(found.indices) == num_select
    assert found.method == "sift" and not found.approximate
    assert_greedy(found, pool, queries, noise_var)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_float32_picks_what_float64_picks(problem: tuple[Matrix, Matrix, int, float]) -> None:
    pool, queries, num_select, noise_var = problem
    pool_32, queries_32 = pool.astype(np.float32), queries.astype(np.float32)
    single = sift(pool_32, queries_32, num_select=num_select, noise_var=noise_var)
    double = sift(pool_32, queries_32, num_select=num_select, noise_var=noise_var, dtype="float64")
    np.testing.assert_array_equal(single.indices, double.indices)
    np.testing.assert_array_equal(single.posterior_var, double.posterior_var)
    assert_greedy(single, pool_32.astype(np.float64), queries_32.astype(np.float64), noise_var)


@settings(deadline=None, max_examples=40)
@given(problems())
def test_tensors_and_arrays_agree_and_nothing_is_written(
    problem: tuple[Matrix, Matrix, int, float],
) -> None:
    pool, queries, num_select, noise_var = problem
    kept = pool.copy(), queries.copy()
    pool.setflags(write=False)
    queries.setflags(write=False)
    arrays = sift(pool, queries, num_select=num_select, noise_var=noise_var)
    tensors = sift(
        torch.tensor(pool), torch.tensor(queries), num_select=num_select, noise_var=noise_var
    )
    np.testing.assert_array_equal(arrays.indices, tensors.indices)
    np.testing.assert_array_equal(arrays.posterior_var, tensors.posterior_var)
    np.testing.assert_array_equal(pool, kept[0])
    np.testing.assert_array_equal(queries, kept[1])


@pytest.mark.parametrize("noise_var", [0.001, 0.01, 0.2, 2.0])
@pytest.mark.parametrize(("num", "width", "rows"), [(60, 20, 1), (60, 20, 3), (150, 64, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_sequence_as_the_full_covariance_matrix(
    num: int, width: int, rows: int, noise_var: float, dtype: str
) -> None:
    rng = np.random.default_rng(num + width + rows)
    pool = rng.standard_normal((num, width)).astype(dtype)
    pool /= np.linalg.norm(pool, axis=1, keepdims=True)
    queries = (rng.standard_normal((rows, width)) + pool[0]).astype(dtype)
    expected = full_matrix_picks(pool.astype(np.float64), queries.astype(np.float64), 40, noise_var)
    found = sift(pool, queries, num_select=40, noise_var=noise_var)
    assert found.indices.tolist() == expected


def test_more_picks_than_candidates_and_dimensions() -> None:
    rng = np.random.default_rng(3)
    pool, queries = rng.standard_normal((4, 3)), rng.standard_normal((2, 3))
    found = sift(pool, queries, num_select=300, noise_var=0.05)
    np.testing.assert_allclose(
        found.posterior_var[[0, 5, 299]],
        posterior_variance(pool, queries, found.indices, 0.05)[[0, 5, 299]],
        rtol=1e-9,
    )
    assert len(set(found.indices.tolist())) <= 4


def test_without_repeats_every_candidate_comes_once() -> None:
    rng = np.random.default_rng(4)
    pool, queries = rng.standard_normal((6, 3)), rng.standard_normal((1, 3))
    for rows in (queries, np.repeat(queries, 2, axis=0)):
        found = sift(pool, rows, num_select=20, allow_repeats=False)
        assert sorted(found.indices.tolist()) == list(range(6))


def test_large_noise_picks_the_largest_squared_inner_product_always() -> None:
    rng = np.random.default_rng(5)
    pool, query = rng.standard_normal((50, 16)), rng.standard_normal((1, 16))
    best = int(((pool @ query[0]) ** 2).argmax())
    found = sift(pool, query, num_select=8, noise_var=1e9)
    assert found.indices.tolist() == [best] * 8


def test_many_query_rows_are_reduced_without_changing_picks() -> None:
    rng = np.random.default_rng(6)
    pool, queries = rng.standard_normal((80, 7)), rng.standard_normal((300, 7))
    found = sift(pool, queries, num_select=25)
    assert found.indices.tolist() == full_matrix_picks(pool, queries, 25, 0.01)
    reference = posterior_variance(pool, queries, found.indices, 0.01)
    np.testing.assert_allclose(found.posterior_var, reference, rtol=1e-9)
    assert found.prior_var == pytest.approx(float(np.sum(queries**2)))


def test_thousands_of_picks_from_a_large_pool_with_many_rows() -> None:
    rng = np.random.default_rng(7)
    pool = rng.standard_normal((3000, 24)).astype(np.float32)
    queries = rng.standard_normal((10, 24)).astype(np.float32)
    found = sift(pool, queries, num_select=1200, noise_var=0.5)
    assert len(found.indices) == 1200
    assert np.all(np.diff(found.posterior_var) <= 1e-12)
    exact = sift(pool, queries, num_select=40, noise_var=0.5, dtype="float64")
    np.testing.assert_array_equal(found.indices[:40], exact.indices)


def test_half_precision_tensors_and_strided_arrays_are_read() -> None:
    rng = np.random.default_rng(8)
    pool, query = rng.standard_normal((30, 8)), rng.standard_normal((1, 8))
    half = torch.tensor(pool).bfloat16()
    same = sift(half.float(), torch.tensor(query), num_select=5)
    np.testing.assert_array_equal(
        sift(half, torch.tensor(query), num_select=5).indices, same.indices
    )
    whole = sift(pool, query, num_select=5)
    strided = sift(np.asfortranarray(pool), query[:, ::-1][:, ::-1], num_select=5)
    np.testing.assert_array_equal(strided.indices, whole.indices)
    float16 = sift(pool.astype(np.float16), query, num_select=5)
    rounded = sift(pool.astype(np.float16).astype(np.float32), query, num_select=5)
    np.testing.assert_array_equal(float16.indices, rounded.indices)


@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1e6, 1e25])
def test_scaling_everything_changes_no_pick(scale: float) -> None:
    rng = np.random.default_rng(9)
    pool, query = rng.standard_normal((40, 12)), rng.standard_normal((2, 12))
    plain = sift(pool, query, num_select=20, noise_var=0.1)
    scaled = sift(pool * scale, query, num_select=20, noise_var=0.1 * scale**2)
    np.testing.assert_array_equal(plain.indices, scaled.indices)


def test_tiny_noise_stays_finite_and_greedy() -> None:
    rng = np.random.default_rng(10)
    pool, query = rng.standard_normal((10, 4)), rng.standard_normal((1, 4))
    for kind in (np.float32, np.float64):
        found = sift(pool.astype(kind), query.astype(kind), num_select=12, noise_var=1e-30)
        assert np.isfinite(found.posterior_var).all()
        assert np.all(np.diff(found.posterior_var) <= 0.0)
        assert found.posterior_var[-1] < 1e-9 * found.prior_var
