"""Doubts about rounding: the bounds hold, and true ties are settled by the rule."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ttt_adapt.selection import sift
from ttt_adapt.selection.accelerator import TensorScreen
from ttt_adapt.selection.pool import squared_norms
from ttt_adapt.selection.screening import RowsScreen, Screen, SingleRowScreen
from ttt_adapt.selection.ties import Doubt

Matrix = NDArray[np.float64]


def pool_of(kind: str, num: int, width: int) -> Matrix:
    rng = np.random.default_rng(width)
    pool = rng.standard_normal((num, width))
    match kind:
        case "one sign":
            pool = rng.random((num, width))
        case "clustered":
            pool = rng.standard_normal(width) + 0.3 * pool
        case "low rank":
            pool = rng.standard_normal((num, 3)) @ rng.standard_normal((3, width))
        case "duplicates":
            pool = np.repeat(pool[: num // 10], 10, axis=0)
        case "mixed scale":
            pool /= np.linalg.norm(pool, axis=1, keepdims=True)
            pool *= np.exp(rng.standard_normal((num, 1)))
            return np.asarray(pool / np.linalg.norm(pool, axis=1).max())
    return np.asarray(pool / np.linalg.norm(pool, axis=1, keepdims=True))


KINDS = ["generic", "one sign", "clustered", "low rank", "duplicates", "mixed scale"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise_var", [1e-3, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("width", [3, 64, 1024, 4096])
def test_rounding_stays_within_three_quarters_of_its_bound(
    kind: str, noise_var: float, width: int
) -> None:
    pool = pool_of(kind, 120, width).astype(np.float32)
    rng = np.random.default_rng(2)
    query = pool[:5].mean(axis=0) + 0.1 * rng.standard_normal(width) / width**0.5
    query = (query / np.linalg.norm(query)).astype(np.float64)[None, :]
    norms2 = squared_norms(pool)
    single = SingleRowScreen(pool, query, noise_var, 80, norms2)
    wide = pool.astype(np.float64)
    double = SingleRowScreen(wide, query, noise_var, 80, squared_norms(wide))
    doubt = Doubt("float32", width, 1.0, single.max_norm2, noise_var)
    for _ in range(80):
        position, score, ratio, _ = single.leader()
        double.leader()
        every, scores, noisy, norms = single.above(-1.0)
        roots, exact = np.sqrt(scores.astype(np.float64)), np.sqrt(double.above(-1.0)[1])
        assert len(every) == len(exact)
        ratios = norms.astype(np.float64) / noisy
        slack = doubt.unit * (np.sqrt(ratios) + roots * (1.0 + ratios)) + doubt._lost * roots
        assert np.max(np.abs(roots - exact) / slack) < 0.75
        doubt.grow(score, ratio)
        single.pick(position)
        double.pick(position)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_every_screen_computes_the_same(rows: int, precision: str) -> None:
    pool = pool_of("clustered", 90, 24).astype(precision)
    queries = pool_of("generic", rows, 24)
    norms2 = squared_norms(pool)
    screens: list[Screen] = [
        RowsScreen(pool, queries, 0.1, 20, norms2),
        TensorScreen(torch.tensor(pool), queries, 0.1, 20),
    ]
    if rows == 1:
        screens.append(SingleRowScreen(pool, queries, 0.1, 20, norms2))
    tolerance = 2e-4 if precision == "float32" else 1e-9
    for step in range(20):
        leaders = [screen.leader() for screen in screens]
        gathered = [screen.above(0.0) for screen in screens]
        for other, values in zip(leaders[1:], gathered[1:], strict=True):
            assert other == pytest.approx(leaders[0], rel=tolerance)
            for one, two in zip(values, gathered[0], strict=True):
                np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance / 100)
        ratio = screens[0].ratio(3)
        for screen in screens:
            assert screen.ratio(3) == pytest.approx(ratio, rel=tolerance)
            screen.pick(leaders[0][0])
            if step % 3 == 0:
                screen.ban(leaders[0][0])


def test_a_screen_of_one_banned_candidate() -> None:
    pool = np.ones((1, 2))
    for screen in (
        SingleRowScreen(pool, pool, 0.1, 3, squared_norms(pool)),
        TensorScreen(torch.tensor(pool), pool, 0.1, 3),
    ):
        assert screen.leader()[0] == 0
        assert screen.leader()[3] == -1.0


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_opposite_and_symmetric_candidates_tie_to_the_lowest(precision: str) -> None:
    eye = np.eye(6, dtype=precision)
    pool = np.concatenate([-eye, eye])
    found = sift(pool, np.ones((1, 6), dtype=precision), num_select=12, noise_var=0.25)
    assert found.indices.tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_a_query_that_no_candidate_knows_about_takes_the_first() -> None:
    pool = np.eye(8, dtype=np.float32)[:4]
    found = sift(pool, np.eye(8, dtype=np.float32)[7:], num_select=3)
    assert found.indices.tolist() == [0, 0, 0]
    assert found.gains.tolist() == [0.0, 0.0, 0.0]


def test_nearly_equal_candidates_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    row, query = rng.standard_normal(300), rng.standard_normal(300)
    pool = np.tile(row, (200, 1))
    pool[137] += 1e-13 * query
    pool[29] += 1e-14 * query
    found = sift(pool, query[None, :], num_select=1, dtype="float32")
    assert found.indices.tolist() == [137]
