"""Measurements over resolutions: memory to the byte, growth and crossovers by hand."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.vision import count_macs, create_model
from ttt_adapt.vision.scaling import (
    Arm,
    Measurement,
    crossover,
    default_arms,
    explicit_attention,
    growth,
    measure,
    peak_bytes,
    summarise,
)
from ttt_adapt.vision.scaling_settings import bench_plan

CPU = torch.device("cpu")
TINY = (("depth", 1), ("dim", 32), ("num_heads", 2))


def row(label: str, num_tokens: int, seconds: float, peak: int = 1) -> Measurement:
    return Measurement(label, 16, num_tokens, 1, seconds, 1 / seconds, peak, 1.0)


def test_peak_memory_to_the_byte() -> None:
    def run() -> None:
        first = torch.empty(1000, 1000)
        second = torch.empty(1000, 1000)
        del first
        third = torch.empty(2000, 1000)
        del second, third

    assert peak_bytes(run, CPU) == 12_000_000
    assert peak_bytes(lambda: None, CPU) == 0


def test_attention_with_its_matrix_is_the_same_and_larger() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16, generator=generator) for _ in range(3))
    fused = functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(explicit_attention(q, k, v), fused, atol=1e-6)
    assert torch.allclose(
        explicit_attention(q, k, v, scale=1.0),
        functional.scaled_dot_product_attention(q, k, v, scale=1.0),
        atol=1e-5,
    )
    matrix = 4 * 2 * 300 * 300
    assert peak_bytes(lambda: explicit_attention(q, k, v), CPU) >= 2 * matrix
    assert peak_bytes(lambda: functional.scaled_dot_product_attention(q, k, v), CPU) < matrix


def measured(mode: Any) -> list[Measurement]:
    arms = [
        Arm("ours", "vision_ttt_tiny", TINY),
        Arm("fused", "vit_tiny_attention", TINY),
        Arm("written", "vit_tiny_attention", TINY, explicit_attention=True),
    ]
    before = functional.scaled_dot_product_attention
    rows = measure(arms, (128, 256, 512), mode=mode, device="cpu", num_turns=1)
    assert functional.scaled_dot_product_attention is before
    return rows


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_memory_is_linear_but_where_the_matrix_is_written(mode: str) -> None:
    rows = measured(mode)
    assert [r.num_tokens for r in rows[::3]] == [64, 256, 1024]
    for label, least, most in (("ours", 0.7, 1.1), ("fused", 0.7, 1.1), ("written", 1.6, 2.1)):
        assert least < growth(rows, label, "peak_bytes", num_largest=2) < most
    larger = crossover(rows, "ours", "written", "peak_bytes")
    assert larger is not None and larger < 1024
    for found in rows:
        model = create_model(
            "vision_ttt_tiny" if found.label == "ours" else "vit_tiny_attention", **dict(TINY)
        )
        assert found.gmacs * 1e9 == pytest.approx(count_macs(model, found.resolution))
        assert found.seconds > 0 and found.images_per_s == 1 / found.seconds


def test_growth_by_hand() -> None:
    rows = [row("a", t, 3.0 * t**1.5, t) for t in (100, 400, 1600)]
    assert growth(rows, "a") == pytest.approx(1.5)
    assert growth(rows, "a", "peak_bytes") == pytest.approx(1.0)
    assert math.isnan(growth(rows[:1], "a")) and math.isnan(growth(rows, "b"))


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ((10, 20, 40, 80, 160), 512.0),  # c t against t², crossing where c = t: exactly
        ((40, 80), 1600.0),  # always ahead from the least on
        ((10, 20), None),
    ],
)
def test_crossovers_by_hand(sides: tuple[int, ...], expected: float | None) -> None:
    rows = [row("ours", s * s, 512.0 * s * s) for s in sides]
    rows += [row("other", s * s, float(s * s) ** 2) for s in sides]
    found = crossover(rows, "ours", "other")
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_summary_says_it_in_words() -> None:
    rows = [row("ours", t, 400.0 * t, t) for t in (100, 1600)]
    rows += [row("other", t, float(t * t), 3 * t) for t in (100, 1600)]
    found = summarise(rows, ["ours", "other"])
    assert found["ratios"]["other"] == {"seconds": 4.0, "peak_bytes": 3.0}
    assert found["lines"][0].startswith("ours: time grows as tokens to the power 1.00")
    assert "faster from 400 tokens, smaller from 100 tokens" in found["lines"][-1]
    assert "other takes 4.00× the time and 3.00× the memory" in found["lines"][-1]


def test_default_arms_are_of_one_size() -> None:
    for size in ("tiny", "small", "base"):
        dims = {
            create_model(arm.model, **dict(arm.overrides), depth=1).settings.dim
            for arm in default_arms(size)
        }
        assert len(dims) == 1


def test_a_plan_and_its_mistakes() -> None:
    plan = bench_plan("tiny", [224, 1280], 2, "float32", training=False)
    assert plan["num_measurements"] == 6 and plan["most_tokens"] == 6400
    assert plan["attention_bytes"] == 2 * 2 * 3 * 6400**2 * 4
    for size, sides, dtype, expected in (
        ("huge", [224], "float32", "size: expected one of tiny"),
        ("tiny", [225], "float32", "multiples of 16, found 225"),
        ("tiny", [], "float32", "found none"),
        ("tiny", [224], "float16", "dtype: expected one of float32"),
    ):
        with pytest.raises(SettingsError, match=expected):
            bench_plan(size, sides, 1, dtype, training=False)
    with pytest.raises(ModelError, match="vision_ttt_huge"):
        measure([Arm("a", "vision_ttt_huge")], (16,), device="cpu")
