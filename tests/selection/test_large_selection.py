"""SIFT over whole corpora: the pass for many query rows against the others and against brute force,
and what it keeps in memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.errors import SelectionError
from ttt_adapt.selection import Posterior, posterior, posterior_variance, screening, sift
from ttt_adapt.selection.greedy import reduced_rows
from ttt_adapt.selection.pool import Precision, squared_norms
from ttt_adapt.selection.products import ProductScreen
from ttt_adapt.selection.screening import RowsScreen, numpy_screen, prefers_products
from ttt_adapt.types import Selection

Matrix = NDArray[np.float64]
PRECISIONS: tuple[Precision, ...] = ("float32", "float64")


@pytest.fixture
def always_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools too, whose picks can be found by brute force."""
    monkeypatch.setattr(screening, "prefers_products", lambda *shape: True)


def families(seed: int, num: int, width: int, num_targets: int) -> tuple[Matrix, Matrix]:
    """Unit rows around eight centres; targets around three of them."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((8, width))
    family = rng.integers(0, 8, num + num_targets)
    family[num:] %= 3
    rows = centres[family] + rng.standard_normal((num + num_targets, width))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[:num], rows[num:]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Matrix, Matrix, int, float, bool]:
    """Pools with duplicates, zero, opposite and scaled rows, more targets than dimensions or fewer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num, num_targets = draw(st.integers(1, 14)), draw(st.integers(2, 12))
    width = draw(st.sampled_from([1, 2, 3, 8, 17, 40]))
    pool, targets = rng.standard_normal((num, width)), rng.standard_normal((num_targets, width))
    if draw(st.booleans()):
        targets = pool[rng.integers(num, size=num_targets)] + 0.1 * targets
    for _ in range(draw(st.integers(0, 4))):
        source, place = rng.integers(num, size=2)
        pool[place] = pool[source] * draw(st.sampled_from([1.0, -1.0, 0.0, 2.5]))
    noise_var = draw(st.sampled_from([1e-6, 1e-3, 0.01, 0.3, 10.0, 1e5]))
    return pool, targets, draw(st.integers(1, 20)), noise_var, draw(st.booleans())


def brute_force_gains(pool: Matrix, targets: Matrix, picked: list[int], noise_var: float) -> Matrix:
    """How much each candidate would lower the targets' variance, by one inverse of D × D."""

    def left(order: list[int]) -> float:
        rows = pool[order]
        precision = np.eye(pool.shape[1]) + rows.T @ rows / noise_var
        return float(np.trace(targets @ np.linalg.solve(precision, targets.T)))

    before = left(picked)
    return np.array([before - left([*picked, one]) for one in range(len(pool))])


@settings(deadline=None, max_examples=120)
@given(problem=problems())
def test_products_match_brute_force(problem: tuple[Matrix, Matrix, int, float, bool]) -> None:
    pool, targets, num_select, noise_var, allow_repeats = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "prefers_products", lambda *shape: True)
        found = sift(
            pool, targets, num_select=num_select, noise_var=noise_var, allow_repeats=allow_repeats
        )
    slack = 1e-11 * float(np.sum(targets**2)) * (1.0 + float((pool**2).sum(1).max()) / noise_var)
    for step, pick in enumerate(found.indices.tolist()):
        before = found.indices[:step].tolist()
        gains = brute_force_gains(pool, targets, before, noise_var)
        if not allow_repeats:
            assert pick not in before
            gains[before] = -np.inf
        assert gains[pick] >= gains.max() - slack
        free = [p for p in range(len(pool)) if allow_repeats or p not in before]
        assert pick == next(p for p in free if (pool[p] == pool[pick]).all())
    assert len(found.indices) == (num_select if allow_repeats else min(num_select, len(pool)))


@settings(deadline=None, max_examples=120)
@given(problem=problems())
def test_products_and_rows_pick_the_same_in_both_precisions(
    problem: tuple[Matrix, Matrix, int, float, bool],
) -> None:
    pool, targets, num_select, noise_var, allow_repeats = problem
    pool, targets = pool.astype(np.float32), targets.astype(np.float32)
    found: list[Selection] = []
    for products in (False, True):
        for dtype in PRECISIONS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(screening, "prefers_products", lambda *shape, yes=products: yes)
                found.append(
                    sift(
                        pool,
                        targets,
                        num_select=num_select,
                        noise_var=noise_var,
                        dtype=dtype,
                        allow_repeats=allow_repeats,
                    )
                )
    for other in found[1:]:
        np.testing.assert_array_equal(other.indices, found[0].indices)
        np.testing.assert_array_equal(other.posterior_var, found[0].posterior_var)


@pytest.mark.parametrize("noise_var", [0.003, 0.1, 10.0])
def test_hundreds_of_picks_agree_with_float64(noise_var: float) -> None:
    """More picks than dimensions, scores falling over orders of magnitude, near-ties everywhere."""
    pool, targets = families(3, 1000, 40, 80)
    pool = np.concatenate([pool, pool[:200]]).astype(np.float32)
    targets = targets.astype(np.float32)
    assert prefers_products(len(pool), 40, 40)
    fast = sift(pool, targets, num_select=200, noise_var=noise_var, allow_repeats=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "prefers_products", lambda *shape: False)
        slow = sift(
            pool, targets, num_select=200, noise_var=noise_var, allow_repeats=False, dtype="float64"
        )
    np.testing.assert_array_equal(fast.indices, slow.indices)
    last = posterior_variance(pool, targets, fast.indices[:40], noise_var)[-1]
    assert fast.posterior_var[39] == pytest.approx(last, rel=1e-9)


@pytest.mark.usefixtures("always_products")
def test_duplicates_are_picked_in_order() -> None:
    pool, targets = families(4, 5, 16, 20)
    pool = np.tile(pool, (4, 1)).astype(np.float32)
    found = sift(pool, targets, num_select=20, noise_var=1.0, allow_repeats=False).indices
    assert sorted(found.tolist()) == list(range(20))
    for row in range(5):
        places = [place for place, pick in enumerate(found.tolist()) if pick % 5 == row]
        assert found[places].tolist() == sorted(found[places].tolist())


@pytest.mark.usefixtures("always_products")
def test_order_of_targets_and_candidates_does_not_matter() -> None:
    pool, targets = families(5, 200, 24, 30)
    pool, targets = pool.astype(np.float32), targets.astype(np.float32)
    shuffled = np.random.default_rng(0).permutation(200)
    straight = sift(pool, targets, num_select=60, noise_var=0.5)
    other = sift(pool[shuffled], targets[::-1], num_select=60, noise_var=0.5)
    np.testing.assert_array_equal(shuffled[other.indices], straight.indices)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_screens_agree(precision: str) -> None:
    pool, targets = families(6, 300, 32, 20)
    pool = pool.astype(precision)
    norms2 = squared_norms(pool)
    rows = RowsScreen(pool, targets, 0.1, 40, norms2)
    products = ProductScreen(pool, targets, 0.1, norms2)
    tolerance = 2e-4 if precision == "float32" else 1e-9
    for step in range(40):
        one, two = rows.leader(), products.leader()
        assert two[:3] == pytest.approx(one[:3], rel=tolerance)
        # A bound of the runner-up: never below it.
        assert two[3] >= one[3] * (1.0 - tolerance)
        least = one[1] / 2.0
        for mine, theirs in zip(products.above(least), rows.above(least), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=tolerance)
        assert products.ratio(7) == pytest.approx(rows.ratio(7), rel=tolerance)
        for screen in (rows, products):
            screen.pick(one[0])
            if step % 3 == 0:
                screen.ban(one[0])


def test_the_bound_of_rounding_holds() -> None:
    """True scores lie within each candidate's margin, long after its score was last made."""
    pool, targets = families(7, 400, 64, 64)
    pool_32 = pool.astype(np.float32)
    screen = ProductScreen(pool_32, targets, 0.05, squared_norms(pool_32))
    exact = ProductScreen(
        pool_32.astype(np.float64), targets, 0.05, squared_norms(pool_32.astype(np.float64))
    )
    for pick in range(120):
        screen.pick(pick)
        exact.pick(pick)
    rows = pool_32 @ exact._rows.T
    truth = np.einsum("km,km->k", rows, rows)
    margins = (screen._error - screen._error_then) * screen._norms2
    assert (np.abs(screen._squares - truth) <= margins).all()
    assert float(np.median(margins)) < 0.1 * float(truth.max())


@pytest.mark.parametrize("noise_var", [1e-3, 1.0])
def test_a_compact_posterior_says_the_same(
    noise_var: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posterior, "_LEAST_COMPACT", 1)
    pool, targets = families(11, 80, 10, 6)
    usual, compact = (Posterior(targets, noise_var, compact=answer) for answer in (False, True))
    for row in pool[:60]:
        assert compact.pick(row) == pytest.approx(usual.pick(row), rel=1e-6, abs=1e-12)
        assert compact.variance(pool[70]) == pytest.approx(usual.variance(pool[70]), rel=1e-6)
        for mine, theirs in zip(compact.gains(pool), usual.gains(pool), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-12)
        assert compact.gain(pool[3]) == pytest.approx(compact.gains(pool[3:4])[0][0], rel=1e-6)
    assert compact.total_var == pytest.approx(usual.total_var, rel=1e-6)
    with pytest.raises(AssertionError, match="Σ alone"):
        _ = compact.directions
    longer = Posterior(targets, noise_var, compact=True)
    np.testing.assert_allclose(
        longer.extend(pool[:60]).sum(), longer.prior_var - compact.total_var, rtol=1e-9
    )
    twice = np.concatenate([pool[5:6]] * 3)
    assert len({longer.gain(row) for row in twice}) == 1


def test_many_rows_and_a_large_pool_choose_products() -> None:
    pool, targets = families(8, 2000, 16, 20)
    norms = reduced_rows(targets)
    assert isinstance(numpy_screen(pool, norms, 0.1, 5), ProductScreen)
    assert isinstance(numpy_screen(pool[:20], norms, 0.1, 5), RowsScreen)
    assert not prefers_products(50_000, 512, 8)


def test_progress_counts_every_pick() -> None:
    pool, targets = families(9, 60, 8, 3)
    for noise_var in (1.0, 1e-12):
        made: list[int] = []
        sift(pool, targets, num_select=7, noise_var=noise_var, progress=made.append)
        assert sum(made) == 7
    made = []
    sift(pool, 0.0 * targets, num_select=7, progress=made.append)
    assert sum(made) == 7


def test_values_that_are_not_finite_are_refused() -> None:
    pool, targets = families(10, 500, 8, 9)
    pool[123, 4] = np.nan
    with pytest.raises(SelectionError, match="row 123"):
        sift(pool, targets, num_select=3)


def peak_megabytes(pool: NDArray[np.float32], targets: NDArray[np.float32], num: int) -> float:
    """The most that numpy holds during a call, beyond what it was given."""
    tracemalloc.start()
    try:
        sift(pool, targets, num_select=num, noise_var=1.0, allow_repeats=False)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_fifty_thousand_rows_in_bounded_memory() -> None:
    """50,000 × 512 with 512 target rows: nothing of K², K·N or K·M (98 MB here) is kept."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((50_000, 512), dtype=np.float32)
    pool += 2.0 * pool[rng.integers(0, 20, 50_000)]
    pool /= np.linalg.norm(pool, axis=1, keepdims=True)
    targets = pool[rng.integers(0, 50_000, 512)] + 0.02 * rng.standard_normal(
        (512, 512), dtype=np.float32
    )
    assert prefers_products(50_000, 512, 512)
    few, more = peak_megabytes(pool, targets, 3), peak_megabytes(pool, targets, 20)
    # Five values a candidate with their temporaries, D·(D + M) twice over, blocks of rows.
    assert few < 40.0
    assert more < few + 2.0
