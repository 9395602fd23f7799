import re
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.errors import SettingsError
from ttt_adapt.indexes import choose_factory
from ttt_adapt.indexes.factory import (
    check_training,
    new_index,
    nlist_of,
    stores_raw_vectors,
)


@pytest.mark.parametrize(
    ("num_vectors", "dimension", "budget_mb", "factory"),
    [
        (1, 384, 1, "Flat"),
        (2_000, 384, 4096, "Flat"),
        (150_000, 384, 4096, "Flat"),
        (300_000, 384, 4096, "HNSW32"),
        (1_000_000, 384, 4096, "IVF2048,Flat"),
        (1_000_000, 384, 1000, "IVF2048,SQ8"),
        (1_000_000, 384, 150, "OPQ128_384,IVF2048,PQ128"),
        (1_000_000, 384, 40, "OPQ32_128,IVF2048,PQ32"),
        (2_000, 384, 1, "SQ8"),
        (210_607_728, 1024, 64 * 1024, "OPQ128_512,IVF4096,PQ128"),
    ],
)
def test_choices(num_vectors: int, dimension: int, budget_mb: int, factory: str) -> None:
    choice = choose_factory(num_vectors, dimension, budget_mb)
    assert choice.factory == factory
    assert (choice.nprobe is None) == ("IVF" not in factory)
    assert choice.memory_bytes <= budget_mb * 2**20


def test_explanations() -> None:
    assert choose_factory(2_000, 384, 4096).explanation == (
        "Flat: an exact scan, the best there is at this size. "
        "2,000 vectors of 384 dimensions take 2.9 MB of the 4,096 MB budget."
    )
    explanation = choose_factory(100_000, 384, 1, train_vectors=100).explanation
    assert "more than the 1 MB budget" in explanation


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 10**9), st.integers(1, 4096), st.integers(1, 10**6), st.integers(1, 10**6))
def test_never_undertrained(
    num_vectors: int, dimension: int, budget_mb: int, train_vectors: int
) -> None:
    choice = choose_factory(num_vectors, dimension, budget_mb, train_vectors=train_vectors)
    num_training = min(num_vectors, train_vectors)
    nlist = nlist_of(choice.factory)
    if nlist is not None:
        assert nlist == 1 or 39 * nlist <= num_training
        assert choice.nprobe is not None
        assert 1 <= choice.nprobe <= nlist
    if "PQ" in choice.factory:
        assert num_training >= 39 * 256
    assert choice.explanation.count(". ") <= 1
    assert choice.memory_bytes <= budget_mb * 2**20 or "more than the" in choice.explanation


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 10**9), st.integers(1, 1100), st.integers(1, 10**5))
def test_choices_are_factories(num_vectors: int, dimension: int, budget_mb: int) -> None:
    factory = choose_factory(num_vectors, dimension, budget_mb).factory
    # FAISS allocates a graph's or a list's table at once; the number of lists does not matter.
    assert new_index(re.sub(r"IVF\d+", "IVF2", factory), dimension).d == dimension


@pytest.mark.parametrize("budget_mb", [4096, 45, 9, 5])
def test_estimates_match_files(tmp_path: Path, budget_mb: int) -> None:
    vectors = np.random.default_rng(0).standard_normal((10_500, 1024 if budget_mb > 9 else 512))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    choice = choose_factory(len(vectors), vectors.shape[1], budget_mb)
    index = new_index(choice.factory, vectors.shape[1])
    if "PQ" in choice.factory:
        # Training is slow and does not matter for the size; the choice does.
        assert choice.factory.startswith("OPQ128_512,IVF256,PQ128")
        return
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index"))
    assert choice.memory_bytes == pytest.approx((tmp_path / "index").stat().st_size, rel=0.05)


def test_the_graph_estimate_matches(tmp_path: Path) -> None:
    num_vectors, dimension = 3000, 8
    vectors = np.random.default_rng(0).standard_normal((num_vectors, dimension))
    index = new_index("HNSW32", dimension)
    index.add(vectors.astype(np.float32))
    faiss.write_index(index, str(tmp_path / "index"))
    per_vector = (tmp_path / "index").stat().st_size / num_vectors - 4 * dimension
    estimate = choose_factory(300_000, 384, 4096)
    assert estimate.factory == "HNSW32"
    assert estimate.memory_bytes / 300_000 - 4 * 384 == pytest.approx(per_vector, rel=0.05)


@pytest.mark.parametrize("bad", [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_nothing_to_choose_for(bad: tuple[int, int, int]) -> None:
    with pytest.raises(SettingsError, match="needs at least 1 vector, 1 dimension, 1 MB"):
        choose_factory(*bad)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("", "expected 'auto' or a FAISS factory string, found ''"),
        ("nonsense", r"FAISS refuses 'nonsense' for 30 dim.*\(could not parse index string nons"),
        ("FlatL2", "FAISS refuses 'FlatL2'"),
        ("IVF4,PQ7", "should be a multiple of the number of subquantizers"),
        ("IMI2x4,Flat", "FAISS refuses 'IMI2x4,Flat'.*not implemented for inner prod"),
        ("LSH", "FAISS refuses 'LSH'"),
        ("HNSW8,PQ5", "searches by another metric than the inner product"),
        ("NSG16", "cannot be built in batches"),
    ],
)
def test_refused_factories(factory: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        new_index(factory, 30)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_too_many_lists() -> None:
    check_training("IVF16,Flat", 16)
    with pytest.raises(SettingsError, match="has 1024 lists, but only 100 vectors"):
        check_training("OPQ8,IVF1k,PQ8", 100)


@pytest.mark.parametrize(
    ("factory", "raw"),
    [
        ("Flat", True),
        ("IDMap,Flat", True),
        ("IVF64,Flat", True),
        ("IVF64_HNSW32,Flat", True),
        ("HNSW32", True),
        ("HNSW32,Flat", True),
        ("HNSW32,SQ8", False),
        ("IVF64,SQ8", False),
        ("SQ8", False),
        ("PCAR16,Flat", False),
        ("IVF64,PQ8", False),
    ],
)
def test_raw(factory: str, raw: bool) -> None:
    assert stores_raw_vectors(factory) is raw
