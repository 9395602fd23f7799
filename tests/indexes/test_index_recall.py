import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import SelectionError
from ttt_adapt.indexes import Index, build_index, measure_recall
from ttt_adapt.indexes.recall import exact_neighbors
from ttt_adapt.testing import HashedWords, sample_passages


def index_with(folder: Path, factory: str, nprobe: int | None = None) -> Index:
    settings = IndexSettings(factory=factory, nprobe=nprobe)
    build_index(sample_passages(200), HashedWords(24), folder, settings, origin={})
    return Index.open(folder)


def test_flat_finds_everything(tmp_path: Path) -> None:
    report = measure_recall(index_with(tmp_path, "Flat"), num_queries=30, k=20)
    assert (report.mean, report.low, report.high) == (1.0, 1.0, 1.0)
    assert (report.num_queries, report.k) == (30, 20)
    assert report.ms_per_query > 0 < report.exact_ms_per_query
    json.dumps(asdict(report))


def test_recall_is_the_share_found(tmp_path: Path) -> None:
    index = index_with(tmp_path, "IVF16,Flat", nprobe=1)
    queries = HashedWords(24).embed([p.text for p in sample_passages(15, first=900)])
    report = measure_recall(index, k=5, queries_QD=queries)
    shares = []
    for query in queries:
        exact = np.argsort(-(index.all_vectors() @ query), kind="stable")[:5]
        found = index.search(query[None], num_candidates=5).ids
        shares.append(len(set(exact.tolist()) & set(found.tolist())) / 5)
    assert report.mean == pytest.approx(np.mean(shares), abs=1e-9)
    assert 0.0 < report.mean < 1.0
    assert report.low < report.mean < report.high
    better = measure_recall(index_with(tmp_path / "8", "IVF16,Flat", 8), k=5, queries_QD=queries)
    assert better.mean > report.mean


def test_k_beyond_the_index_and_seeds(tmp_path: Path) -> None:
    index = index_with(tmp_path, "IVF4,SQ8")
    assert measure_recall(index, num_queries=3, k=10_000).mean == 1.0
    again = [measure_recall(index, num_queries=10, k=10, seed=5).mean for _ in range(2)]
    assert again[0] == again[1]
    with pytest.raises(SelectionError, match="recall needs k and num_queries ≥ 1, found 0 and 3"):
        measure_recall(index, num_queries=3, k=0)


def test_blocks_equal_one_product() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((40_000, 4)).astype(np.float32)
    queries = generator.standard_normal((3, 4)).astype(np.float32)
    found = np.sort(exact_neighbors(vectors, queries, 7), axis=1)
    expected = np.sort(np.argsort(-(queries @ vectors.T), axis=1)[:, :7], axis=1)
    np.testing.assert_array_equal(found, expected)
