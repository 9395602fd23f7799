"""What no selector accepts, and what it says."""

from typing import Any

import numpy as np
import pytest
import torch

from ttt_adapt.errors import SelectionError, UserError
from ttt_adapt.selection import (
    greedy_gap,
    mmr,
    nearest,
    nearest_distinct,
    random,
    sift,
    sift_fast,
    uncertainty,
)

SELECTORS = [sift, sift_fast, uncertainty, nearest, nearest_distinct, mmr, random]
every_selector = pytest.mark.parametrize("selector", SELECTORS, ids=lambda one: one.__name__)
POOL = np.eye(4, dtype=np.float32)
QUERY = POOL[:1]


def with_value(value: float) -> Any:
    broken = POOL.copy()
    broken[2, 1] = value
    return broken


@every_selector
@pytest.mark.parametrize(
    ("candidates", "queries", "message"),
    [
        (POOL[:0], QUERY, r"candidates: expected at least one vector .* found shape \(0, 4\)"),
        (POOL, QUERY[:0], r"queries: expected at least one vector .* found shape \(0, 4\)"),
        (POOL[:, :0], QUERY[:, :0], r"candidates: .* found shape \(4, 0\)"),
        (POOL, QUERY[:, :3], "expected one width D, found 4 and 3; embed both with the same model"),
        (POOL, QUERY[0], r"queries: expected a matrix .* found 1 dimension\(s\); give a single"),
        (POOL[None], QUERY, r"candidates: expected a matrix .* found 3 dimension\(s\)"),
        (with_value(np.nan), QUERY, "candidates: expected finite values, .* in row 2; embed"),
        (with_value(np.inf), QUERY, "candidates: expected finite values, .* in row 2; embed"),
        (torch.tensor(with_value(np.nan)), QUERY, "candidates: expected finite values, .* row 2"),
        (POOL, with_value(np.nan), "queries: expected finite values, .* in row 2; embed"),
        (POOL.astype(np.int64), QUERY, "candidates: expected floating-point values, found int64"),
        (POOL, torch.ones((1, 4), dtype=torch.int32), "queries: expected floating-point values"),
    ],
)
def test_bad_matrices(selector: Any, candidates: Any, queries: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        selector(candidates, queries, num_select=2)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


@every_selector
@pytest.mark.parametrize("num_select", [0, -3, 1.5, None, True, "2"])
def test_bad_counts(selector: Any, num_select: Any) -> None:
    with pytest.raises(SelectionError, match="num_select: expected a whole number of at least 1"):
        selector(POOL, QUERY, num_select=num_select)


@every_selector
@pytest.mark.parametrize("noise_var", [0.0, -0.1, float("nan"), float("inf"), None])
def test_bad_noise(selector: Any, noise_var: Any) -> None:
    with pytest.raises(SelectionError, match="noise_var: expected a positive finite number"):
        selector(POOL, QUERY, num_select=2, noise_var=noise_var)


@every_selector
def test_numpy_counts_are_counts(selector: Any) -> None:
    assert len(selector(POOL, QUERY, num_select=np.int32(2)).indices) == 2


def test_values_whose_squares_overflow() -> None:
    with pytest.raises(SelectionError, match="squares are finite, found a largest value of 1e"):
        sift(np.full((3, 2), 1e200), np.ones((1, 2)), num_select=1)
    with pytest.raises(SelectionError, match="queries: expected values whose squares are finite"):
        sift(np.ones((3, 2)), np.full((1, 2), 1e200), num_select=1)


def test_large_float32_values_go_to_float64() -> None:
    rng = np.random.default_rng(0)
    pool, query = rng.standard_normal((20, 5)), rng.standard_normal((1, 5))
    large = sift((pool * 1e25).astype(np.float32), query, num_select=4, noise_var=1e48)
    same = sift((pool * 1e25).astype(np.float32) / 1e25, query, num_select=4, noise_var=0.01)
    assert large.indices.tolist() == same.indices.tolist()


def test_options_of_single_selectors() -> None:
    with pytest.raises(SelectionError, match="dtype: expected 'float32' or 'float64', found 'bf"):
        sift(POOL, QUERY, num_select=1, dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="threshold: expected a number from 0 to 1, found 2"):
        nearest_distinct(POOL, QUERY, num_select=1, threshold=2.0)
    with pytest.raises(SelectionError, match="relevance: expected a number from 0 to 1, found -1"):
        mmr(POOL, QUERY, num_select=1, relevance=-1.0)
    with pytest.raises(SelectionError, match="seed: expected a whole number of at least 0"):
        random(POOL, QUERY, num_select=1, seed=-1)


def test_a_gap_compares_like_with_like() -> None:
    short, long = (sift(POOL, QUERY, num_select=count) for count in (2, 3))
    with pytest.raises(SelectionError, match="greedy_gap: expected two selections for the same"):
        greedy_gap(short, long)
    with pytest.raises(SelectionError, match="found 2 picks from prior variance 1 and 2 from 4"):
        greedy_gap(short, sift(POOL, QUERY * 2, num_select=2))
