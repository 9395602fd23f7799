import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import (
    CorpusError,
    FingerprintMismatchError,
    IndexFormatError,
    SettingsError,
)
from ttt_adapt.indexes import BuildProgress, Index, build_index, verify_index
from ttt_adapt.indexes.layout import LOCK, TIMINGS
from ttt_adapt.testing import HashedWords, sample_passages
from ttt_adapt.types import Passage

SETTINGS = IndexSettings(shard_passages=40)
ORIGIN = {"corpus": "words", "chunks": {"size": 12}}


class Interrupted(Exception):
    pass


class Stopping(HashedWords):
    """Embeds a number of shards, then fails; counts the texts it embedded."""

    def __init__(self, num_shards: int) -> None:
        super().__init__()
        self.num_shards = num_shards
        self.num_texts = 0

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        if self.num_shards == 0:
            raise Interrupted
        self.num_shards -= 1
        self.num_texts += len(texts)
        return super().embed(texts, progress=progress)


class Broken(HashedWords):
    """Passes every array through ``change``."""

    def __init__(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
        super().__init__()
        self.change = change

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        return self.change(super().embed(texts, progress=progress))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (LOCK, TIMINGS)
    }


def build(folder: Path, num_documents: int = 50, **kwargs: Any) -> Any:
    values = {"embedder": HashedWords(), "settings": SETTINGS, "origin": ORIGIN, **kwargs}
    passages = values.pop("passages", None) or sample_passages(num_documents)
    return build_index(passages, folder=folder, **values)


def test_everything_is_stored(tmp_path: Path) -> None:
    info = build(tmp_path / "index")
    assert (info.num_passages, info.num_documents, info.dimension) == (150, 50, 32)
    assert (info.factory, info.num_shards, info.num_resumed) == ("Flat", 4, 0)
    assert info.origin == ORIGIN
    assert {"read", "embed", "store", "add", "write"} <= info.seconds.keys()
    json.dumps(info.to_json())
    index = Index.open(tmp_path / "index")
    expected = list(sample_passages(50))
    assert index.passages(range(150)) == expected
    assert index.passages([149, 0, 41, 0]) == [expected[i] for i in (149, 0, 41, 0)]
    vectors = HashedWords().embed([p.text for p in expected])
    np.testing.assert_array_equal(index.all_vectors(), vectors)
    np.testing.assert_array_equal(index.vectors([7, 120]), vectors[[7, 120]])
    assert not index.all_vectors().flags.writeable
    assert replace(index.info) == info
    assert verify_index(tmp_path / "index") == []


def test_passages_open_through_datasets(tmp_path: Path) -> None:
    build(tmp_path / "index")
    shard = datasets.Dataset.from_file(str(tmp_path / "index/shards/00001.arrow"))
    columns = ["id", "document_id", "ordinal", "text", "source", "subset"]
    assert shard.column_names == columns
    assert shard[0]["id"] == "document-13#1"
    everything = Index.open(tmp_path / "index").dataset()
    assert everything["text"] == [p.text for p in sample_passages(50)]


def test_unicode_and_empty_fields_survive(tmp_path: Path) -> None:
    passages = [
        Passage("ä\u2028#0", "ä\u2028", 0, "日本語 \x00 🙂\r\n", "", ""),
        Passage("#0", "", 0, "x", "\t", "\\"),
    ]
    build(tmp_path, passages=passages)
    assert Index.open(tmp_path).passages([0, 1]) == passages


def test_a_continued_build_embeds_only_what_is_missing(tmp_path: Path) -> None:
    build(tmp_path / "whole")
    stopping = Stopping(2)
    with pytest.raises(Interrupted):
        build(tmp_path / "index", embedder=stopping)
    with pytest.raises(IndexFormatError, match="unfinished: run the build again to continue"):
        Index.open(tmp_path / "index")
    events: list[Any] = []
    progress = BuildProgress(
        on_stage=lambda stage, total: events.append((stage, total)),
        on_advance=lambda count: events.append(count),
        on_resumed=lambda count: events.append(("resumed", count)),
    )
    continuing = Stopping(99)
    info = build(tmp_path / "index", embedder=continuing, progress=progress)
    assert info.num_resumed == 80
    assert continuing.num_texts == 70
    assert events[:3] == [("embed", None), ("resumed", 40), ("resumed", 40)]
    assert events[3:-3] == [1] * 70
    assert events[-3:] == [("add", 150), 150, ("write", None)]
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["vectors.bin", "shards/00000.arrow", "shards/00001.json"])
def test_damage_before_continuing_is_mended(tmp_path: Path, name: str) -> None:
    build(tmp_path / "whole")
    with pytest.raises(Interrupted):
        build(tmp_path / "index", embedder=Stopping(3))
    data = bytearray((tmp_path / "index" / name).read_bytes())
    data[100] ^= 4
    (tmp_path / "index" / name).write_bytes(data)
    build(tmp_path / "index")
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


def test_same_build_again_changes_nothing(tmp_path: Path) -> None:
    build(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    info = build(tmp_path, embedder=Stopping(0))
    assert info.num_resumed == 150
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"origin": {**ORIGIN, "corpus": "other"}}, r'corpus was "words", is now "other"'),
        ({"settings": SETTINGS.model_copy(update={"seed": 3})}, "settings.seed was 0, is now 3"),
        (
            {"settings": SETTINGS.model_copy(update={"shard_passages": 9})},
            "settings.shard_passages was 40, is now 9",
        ),
        ({"embedder": HashedWords(16)}, "embedder.description was .*32 dim.*, is now .*16 dim"),
    ],
)
def test_another_build_is_refused(
    tmp_path: Path, finished: bool, change: dict[str, Any], message: str
) -> None:
    if finished:
        build(tmp_path)
    else:
        with pytest.raises(Interrupted):
            build(tmp_path, embedder=Stopping(2))
    before = contents(tmp_path)
    state = "a finished" if finished else "an unfinished"
    with pytest.raises(FingerprintMismatchError, match=f"(?s)holds {state} index of.*{message}"):
        build(tmp_path, **change)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_corpus_is_refused(tmp_path: Path, finished: bool) -> None:
    if finished:
        build(tmp_path)
    else:
        with pytest.raises(Interrupted):
            build(tmp_path, embedder=Stopping(2))
    before = contents(tmp_path)
    changed = list(sample_passages(50))
    changed[45] = replace(changed[45], text="another text")
    with pytest.raises(FingerprintMismatchError, match=r"corpus (is not|has changed).*remove the"):
        build(tmp_path, passages=changed)
    with pytest.raises(
        FingerprintMismatchError, match=r"(ends after 39|has 39|from.*differs|other ones)"
    ):
        build(tmp_path, num_documents=13)
    assert contents(tmp_path) == before


def test_no_passages(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no passages to index: the corpus is empty"):
        build(tmp_path / "index", passages=iter(()))
    with pytest.raises(IndexFormatError, match="no index here"):
        Index.open(tmp_path / "index")
    # Nothing was begun, so any build may begin.
    build(tmp_path / "index", origin={"corpus": "other"})


def with_nan(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    vectors[3, 1] = np.nan
    return vectors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, r"NaN or infinity for passage 'document-1#0' \(words.txt:1\)"),
        (lambda v: v[:, :20], "dimension 20, but says its dimension is 32"),
        (lambda v: v[1:], r"shape \(39, 32\) for 40 passages"),
        (lambda v: 2 * v, "norm 2 for passage 'document-0#0'; an index needs unit vectors"),
    ],
)
def test_broken_embedders(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(IndexFormatError, match=message):
        build(tmp_path, embedder=Broken(change))


def test_repeated_ids_are_named(tmp_path: Path) -> None:
    passages = [*sample_passages(30), *sample_passages(1, first=4)]
    with pytest.raises(CorpusError, match="passage id 'document-4#0' occurs twice"):
        build(tmp_path, passages=passages)


def test_lone_surrogates_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"passage 'a#0': holds a lone surrogate"):
        build(tmp_path, passages=[Passage("a#0", "a", 0, "x \ud800")])


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(IndexFormatError, match=r"holds files that are no index \(thesis.tex"):
        build(tmp_path)
    with pytest.raises(IndexFormatError, match="expected a folder for the index, found a file"):
        build(tmp_path / "thesis.tex")


def test_origin_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="origin: expected JSON values"):
        build(tmp_path, origin={"path": tmp_path})


def test_a_factory_that_cannot_be_trained_costs_no_embedding(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"factory": "IVF1000,Flat"})
    with pytest.raises(SettingsError, match="has 1000 lists, but only 150 vectors.*at most IVF3,"):
        build(tmp_path, settings=settings)
    info = build(
        tmp_path,
        settings=SETTINGS.model_copy(update={"factory": "IVF3,Flat"}),
        embedder=Stopping(0),
    )
    assert (info.factory, info.nprobe, info.num_resumed) == ("IVF3,Flat", 3, 150)
    build(tmp_path / "at-once", settings=SETTINGS.model_copy(update={"factory": "IVF3,Flat"}))
    once = contents(tmp_path / "at-once")
    assert {name: contents(tmp_path)[name] for name in once} == once


def test_a_bad_factory_is_found_before_embedding(tmp_path: Path) -> None:
    def nothing() -> Iterator[Passage]:
        raise AssertionError("the corpus was read")
        yield

    with pytest.raises(SettingsError, match="FAISS refuses 'Flot' for 32 dimensions"):
        build(
            tmp_path,
            settings=SETTINGS.model_copy(update={"factory": "Flot"}),
            passages=nothing(),
        )


@pytest.mark.parametrize(
    "factory", ["IVF4,Flat", "HNSW16", "IVF4_HNSW8,Flat", "OPQ2_4,IVF4,PQ2x4", "IVF4,SQ8"]
)
def test_files_do_not_depend_on_threads(tmp_path: Path, factory: str) -> None:
    settings = SETTINGS.model_copy(update={"factory": factory, "add_batch": 64})
    before = faiss.omp_get_max_threads()
    try:
        for num_threads in (1, 2):
            faiss.omp_set_num_threads(num_threads)
            build(
                tmp_path / str(num_threads),
                num_documents=100,
                settings=settings,
                embedder=HashedWords(8),
            )
            assert faiss.omp_get_max_threads() == num_threads
    finally:
        faiss.omp_set_num_threads(before)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_search_settings_are_kept(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"factory": "IVF4,Flat", "nprobe": 2, "ef_search": 7})
    info = build(tmp_path, settings=settings)
    assert (info.nprobe, info.ef_search) == (2, 7)
    assert info.explanation.startswith("IVF4,Flat, as the settings say; it takes 0.0 MB. Its k-m")
