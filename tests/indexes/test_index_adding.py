from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import CorpusError, FingerprintMismatchError, IndexFormatError
from ttt_adapt.indexes import (
    BuildProgress,
    Index,
    add_to_index,
    build_index,
    measure_recall,
    verify_index,
)
from ttt_adapt.testing import HashedWords, sample_passages

FACTORIES = [
    "auto",
    "IVF8,Flat",
    "HNSW16",
    "IVF8,PQ4x4",
    "IVF32,PQ8x4fs",
    "IDMap,Flat",
    "PCAR8,IVF4,SQ8",
]


def build(folder: Path, factory: str = "auto", num_documents: int = 100) -> None:
    settings = IndexSettings(shard_passages=70, factory=factory, add_batch=128)
    build_index(sample_passages(num_documents), HashedWords(16), folder, settings, origin={})


@pytest.mark.parametrize("factory", FACTORIES)
def test_new_documents_are_found(tmp_path: Path, factory: str) -> None:
    build(tmp_path, factory)
    before = Index.open(tmp_path)
    recall_before = measure_recall(before, num_queries=40, k=10).mean
    counts: list[int] = []
    info = add_to_index(
        tmp_path,
        sample_passages(60, first=80),
        HashedWords(16),
        progress=BuildProgress(on_advance=counts.append),
    )
    assert (info.num_passages, info.num_documents) == (420, 140)
    assert (info.num_skipped_documents, info.num_additions, info.num_resumed) == (20, 1, 0)
    assert counts[:120] == [1] * 120
    assert sum(counts[120:]) == 120
    assert info.factory == before.info.factory
    assert info.content_hash != before.info.content_hash
    assert verify_index(tmp_path) == []
    index = Index.open(tmp_path)
    expected = list(sample_passages(140))
    assert index.passages(range(420)) == expected
    vectors = HashedWords(16).embed([p.text for p in expected])
    np.testing.assert_array_equal(index.all_vectors(), vectors)
    for row in (300, 419, 5):
        assert index.search(vectors[row : row + 1], num_candidates=1).ids.tolist() == [row]
    assert measure_recall(index, num_queries=40, k=10).mean >= recall_before - 0.1
    # A reader from before keeps what it had.
    assert len(before) == 300
    assert before.search(vectors[:1], num_candidates=1).ids.tolist() == [0]
    assert index.dataset()["id"] == [p.id for p in expected]


def test_flat_after_adding_is_flat_built_at_once(tmp_path: Path) -> None:
    build(tmp_path / "added", num_documents=70)
    add_to_index(tmp_path / "added", sample_passages(30, first=70), HashedWords(16))
    build(tmp_path / "once")
    assert (tmp_path / "added/faiss-0001.index").read_bytes() == (
        tmp_path / "once/faiss-0000.index"
    ).read_bytes()
    assert not (tmp_path / "added/faiss-0000.index").exists()


def test_nothing_new(tmp_path: Path) -> None:
    build(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    info = add_to_index(tmp_path, sample_passages(100), HashedWords(16))
    assert (info.num_passages, info.num_skipped_documents, info.num_additions) == (300, 100, 0)
    assert add_to_index(tmp_path, iter(()), HashedWords(16)).num_passages == 300
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_documents_left_out_with_another_text_are_counted(tmp_path: Path) -> None:
    build(tmp_path)
    passages = list(sample_passages(110, first=90))
    # Document 99 ends otherwise; document 98 has lost its last passage.
    edited = [*passages[:26], *passages[27:29], replace(passages[29], text="x"), *passages[30:]]
    info = add_to_index(tmp_path, edited, HashedWords(16))
    assert (info.num_skipped_documents, info.num_changed_documents) == (10, 2)
    assert info.num_documents == 200
    (note,) = info.notes
    assert note.startswith("2 of the documents left out have another text")
    assert repr(passages[24].document_id) in note and "id_prefix" in note
    again = add_to_index(tmp_path, sample_passages(200), HashedWords(16))
    assert (again.num_skipped_documents, again.num_changed_documents) == (200, 0)
    assert again.notes == ()


def test_outgrown_indexes_say_so(tmp_path: Path) -> None:
    build(tmp_path, num_documents=10)
    assert add_to_index(tmp_path, sample_passages(20, first=10), HashedWords(16)).notes == ()
    info = add_to_index(tmp_path, sample_passages(10, first=30), HashedWords(16))
    assert info.num_additions == 2
    assert info.notes[0].startswith("grown from 30 to 120 passages since Flat was chosen and tr")
    assert Index.open(tmp_path).info.notes == info.notes
    assert verify_index(tmp_path) == []


def test_the_same_build_after_an_addition_is_still_a_no_op(tmp_path: Path) -> None:
    build(tmp_path)
    add_to_index(tmp_path, sample_passages(5, first=100), HashedWords(16))
    build(tmp_path)
    assert len(Index.open(tmp_path)) == 315


def test_a_different_interrupted_addition_leaves_nothing(tmp_path: Path) -> None:
    build(tmp_path / "index")

    def stops() -> object:
        yield from sample_passages(50, first=500)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_to_index(tmp_path / "index", stops(), HashedWords(16))  # type: ignore[arg-type]
    assert (tmp_path / "index/shards/00006.json").exists()
    assert verify_index(tmp_path / "index") == []
    add_to_index(tmp_path / "index", sample_passages(4, first=100), HashedWords(16))
    build(tmp_path / "clean")
    add_to_index(tmp_path / "clean", sample_passages(4, first=100), HashedWords(16))
    for path in sorted((tmp_path / "clean").rglob("*")):
        other = tmp_path / "index" / path.relative_to(tmp_path / "clean")
        if path.is_file() and path.name != "timings.json":
            assert other.read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "index").rglob("*"))) == len(list((tmp_path / "clean").rglob("*")))


def test_additions_are_checked(tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match="no such folder"):
        add_to_index(tmp_path / "nowhere", sample_passages(1), HashedWords(16))
    build(tmp_path / "index")
    with pytest.raises(FingerprintMismatchError, match="dimension 16.*makes 8"):
        add_to_index(tmp_path / "index", sample_passages(1), HashedWords(8))
    twice = [*sample_passages(1, first=200)] * 2
    with pytest.raises(CorpusError, match="'document-200#0' occurs twice"):
        add_to_index(tmp_path / "index", twice, HashedWords(16))
    assert verify_index(tmp_path / "index") == []
