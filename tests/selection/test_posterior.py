"""Identities of the posterior variance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection import Posterior, posterior_variance, random, sift

Matrix = NDArray[np.float64]


@st.composite
def pools(draw: st.DrawFn) -> tuple[Matrix, Matrix, float]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num, rows, width = draw(st.integers(1, 20)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    pool, queries = rng.standard_normal((num, width)), rng.standard_normal((rows, width))
    return pool, queries, draw(st.sampled_from([1e-6, 1e-3, 0.01, 1.0, 50.0]))


@settings(deadline=None, max_examples=80)
@given(pools(), st.integers(0, 1000))
def test_reported_variance_is_the_solved_one(
    problem: tuple[Matrix, Matrix, float], seed: int
) -> None:
    pool, queries, noise_var = problem
    found = random(pool, queries, num_select=len(pool), noise_var=noise_var, seed=seed)
    reference = posterior_variance(pool, queries, found.indices, noise_var)
    slack = 1e-11 * found.prior_var * (1.0 + np.max(np.sum(pool**2, axis=1)) / noise_var)
    np.testing.assert_allclose(found.posterior_var, reference, rtol=0, atol=slack)


@settings(deadline=None, max_examples=80)
@given(pools())
def test_falls_stays_in_bounds_and_gains_add_up(problem: tuple[Matrix, Matrix, float]) -> None:
    pool, queries, noise_var = problem
    found = sift(pool, queries, num_select=15, noise_var=noise_var)
    assert np.all(found.gains >= 0.0)
    assert np.all(np.diff(found.posterior_var) <= 0.0)
    assert np.all(found.posterior_var >= 0.0)
    assert np.all(found.posterior_var <= found.prior_var)
    assert found.prior_var == pytest.approx(float(np.sum(queries**2)), rel=1e-12)
    fall = found.prior_var - found.posterior_var[-1]
    assert found.gains.sum() == pytest.approx(fall, abs=1e-12 * found.prior_var)


@settings(deadline=None, max_examples=40)
@given(pools())
def test_a_set_has_one_posterior_whatever_the_order(
    problem: tuple[Matrix, Matrix, float],
) -> None:
    pool, queries, noise_var = problem
    order = np.arange(len(pool))
    backwards = posterior_variance(pool, queries, order[::-1], noise_var)[-1]
    first, second = Posterior(queries, noise_var), Posterior(queries, noise_var)
    first.extend(pool[order])
    for row in pool[order[::-1]]:
        second.pick(row)
    slack = 1e-10 * first.prior_var * (1.0 + np.max(np.sum(pool**2, axis=1)) / noise_var)
    assert abs(first.total_var - second.total_var) <= slack
    assert abs(first.total_var - backwards) <= slack


@settings(deadline=None, max_examples=40)
@given(pools())
def test_one_at_a_time_in_blocks_and_in_advance_agree(
    problem: tuple[Matrix, Matrix, float],
) -> None:
    pool, queries, noise_var = problem
    posterior, blocks = Posterior(queries, noise_var), Posterior(queries, noise_var)
    half = len(pool) // 2
    block_gains = np.concatenate([blocks.extend(pool[:half]), blocks.extend(pool[half:])])
    slack = 1e-11 * posterior.prior_var * (1.0 + np.max(np.sum(pool**2, axis=1)) / noise_var)
    for row, block_gain in zip(pool, block_gains, strict=True):
        expected, gains = posterior.gain(row), posterior.gains(pool)[0]
        assert gains[(pool == row).all(axis=1)][0] == pytest.approx(expected, abs=slack)
        gain = posterior.pick(row)
        assert gain == pytest.approx(expected, abs=slack)
        assert block_gain == pytest.approx(gain, abs=slack)
    assert posterior.num_picked == len(pool)
    width = pool.shape[1]
    covariance = np.eye(width) - posterior.directions.T @ posterior.directions
    expected_covariance = np.linalg.inv(np.eye(width) + pool.T @ pool / noise_var)
    np.testing.assert_allclose(covariance, expected_covariance, atol=1e-7)


def test_blocks_longer_than_one_factor() -> None:
    rng = np.random.default_rng(0)
    pool, queries = rng.standard_normal((700, 30)), rng.standard_normal((400, 30))
    whole, kept = Posterior(queries, 0.1), Posterior(queries, 0.1)
    gains = whole.extend(pool, last=True)
    np.testing.assert_allclose(kept.extend(pool), gains, rtol=1e-7, atol=1e-9)
    reference = posterior_variance(pool[:150], queries, np.arange(150), 0.1)
    np.testing.assert_allclose(whole.prior_var - np.cumsum(gains)[:150], reference, rtol=1e-8)


def test_repeating_a_pick_tells_ever_less() -> None:
    query = np.array([[0.6, 0.8]])
    pool = np.array([[1.0, 0.0]])
    found = sift(pool, query, num_select=5, noise_var=0.5)
    counts = np.arange(1, 6)
    # n noisy looks at one candidate: v = c² (1 − n/(n + λ)) of the explained part.
    expected = 1.0 - 0.36 * counts / (counts + 0.5)
    np.testing.assert_allclose(found.posterior_var, expected, rtol=1e-12)


def test_equal_rows_have_equal_gains_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    row = rng.standard_normal(37)
    for width in (37, 36, 5):
        block = np.empty((9, width + 3))
        block[:, 3:] = row[:width]
        posterior = Posterior(rng.standard_normal((3, width)), 0.1)
        for other in rng.standard_normal((6, width)):
            posterior.pick(other)
        gains = {posterior.gain(some) for some in block[:, 3:]}
        assert len(gains) == 1


@pytest.mark.parametrize("indices", [[0, 5], [-1], [0.5], [[0]]])
def test_positions_outside_the_pool_are_refused(indices: list[object]) -> None:
    pool = np.eye(5)
    with pytest.raises(SelectionError, match="expected whole positions from 0 to 4, found"):
        posterior_variance(pool, pool[:1], indices, 0.1)
