import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import pytest

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import FingerprintMismatchError, IndexFormatError, UserError
from ttt_adapt.indexes import Index, build_index, verify_index
from ttt_adapt.indexes.layout import FORMAT_VERSION, LOCK, TIMINGS
from ttt_adapt.storage import stable_hash
from ttt_adapt.testing import HashedWords, sample_passages

FILES = [
    "build.json",
    "faiss-0000.index",
    "manifest.json",
    "shards/00000.arrow",
    "shards/00000.json",
    "shards/00001.arrow",
    "shards/00001.json",
    "vectors.bin",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "index"
    settings = IndexSettings(shard_passages=60, factory="IVF2,Flat")
    build_index(sample_passages(40), HashedWords(8), folder, settings, origin={"corpus": "words"})
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "index"))


def test_every_file_is_listed(built: Path) -> None:
    found = {str(p.relative_to(built)) for p in built.rglob("*") if p.is_file()}
    assert found == {*FILES, LOCK, TIMINGS}
    assert {*Index.open(built).info.to_json()} >= {"num_bytes", "content_hash", "format_version"}


@pytest.mark.parametrize("name", FILES)
def test_truncation_is_found_at_once(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    for kept in (size - 1, size // 2, 0):
        with (folder / name).open("r+b") as stream:
            stream.truncate(kept)
        assert verify_index(folder) != []
        with pytest.raises(IndexFormatError) as caught:
            Index.open(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_found_at_once(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert verify_index(folder) != []
    message = "unfinished" if name == "manifest.json" else f"damaged index: {name}: missing"
    with pytest.raises(IndexFormatError, match=message):
        Index.open(folder)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_found(folder: Path, name: str) -> None:
    generator = random.Random(name)
    original = (folder / name).read_bytes()
    for _ in range(12 if name == "manifest.json" else 40):
        data = bytearray(original)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(data)
        problems = verify_index(folder)
        assert problems
        assert all("\n" not in problem for problem in problems)
        # Opened all the same, a damaged index raises what a user can read, or answers.
        try:
            index = Index.open(folder)
            if name != "faiss-0000.index":
                index.search(index.vectors([0]), num_candidates=5)
                index.passages(range(len(index)))
        except UserError as error:
            assert "\n" not in str(error)
    (folder / name).write_bytes(original)
    assert verify_index(folder) == []


def test_every_bit_of_the_manifest_counts(folder: Path) -> None:
    path = folder / "manifest.json"
    original = path.read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        data = bytearray(original)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        with pytest.raises(IndexFormatError):
            Index.open(folder)


def test_missing_places(tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match="nowhere: no such folder; build an index there"):
        Index.open(tmp_path / "nowhere")
    with pytest.raises(IndexFormatError, match="no index here .manifest.json is missing.; build"):
        Index.open(tmp_path)
    assert len(verify_index(tmp_path / "nowhere")) == 1


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    value.pop("checksum")
    change(value)
    value["checksum"] = stable_hash(value)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def test_another_format(folder: Path) -> None:
    rewrite(folder, lambda value: value.update(format_version=FORMAT_VERSION + 1))
    with pytest.raises(IndexFormatError, match="format version 2 is newer than 1.*upgrade"):
        Index.open(folder)
    rewrite(folder, lambda value: value.update(format="zip"))
    with pytest.raises(IndexFormatError, match="expected 'ttt-adapt index', found 'zip'"):
        Index.open(folder)
    for text in ("", "[]", "null", '{"format": 1}', "[" * 100_000):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(IndexFormatError, match="damaged|expected 'ttt-adapt index'"):
            Index.open(folder)


def test_names_outside_the_folder_are_not_opened(folder: Path) -> None:
    (folder.parent / "secret").write_text("x")
    entry = {"bytes": 1, "sha256": "0"}
    rewrite(folder, lambda value: value["files"].update({"../secret": entry}))
    with pytest.raises(IndexFormatError):
        Index.open(folder)
    assert "secret" in " ".join(verify_index(folder)) or "damaged" in verify_index(folder)[0]


def test_a_faiss_file_of_another_index(folder: Path) -> None:
    index = faiss.index_factory(8, "Flat", faiss.METRIC_INNER_PRODUCT)
    path = folder / "faiss-0000.index"
    size = path.stat().st_size
    faiss.write_index(index, str(path))
    path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    opened = Index.open(folder)
    with pytest.raises(IndexFormatError, match="expected 120 vectors of 8 dimensions, found 0"):
        opened.search(opened.vectors([0]), num_candidates=1)
    path.write_bytes(b"\x80" * size)
    with pytest.raises(IndexFormatError, match="FAISS cannot read it"):
        Index.open(folder).search(opened.vectors([0]), num_candidates=1)
    late = Index.open(folder)
    path.unlink()
    with pytest.raises(IndexFormatError, match="missing; if documents were added .* open it again"):
        late.search(opened.vectors([0]), num_candidates=1)


def test_embedders_are_checked(folder: Path) -> None:
    index = Index.open(folder)
    index.require_embedder(HashedWords(8))
    with pytest.raises(FingerprintMismatchError, match=r"dimension 8 .*the embedder makes 16"):
        index.require_embedder(HashedWords(16))
    other = HashedWords(8)
    other.fingerprint = "f" * 64
    with pytest.raises(FingerprintMismatchError, match=r"built with hashed words.*ffffffffffff"):
        index.require_embedder(other)


def test_timings_are_a_courtesy(folder: Path) -> None:
    for text in ("", "[1]", '{"embed": "x"}'):
        (folder / TIMINGS).write_text(text)
        assert Index.open(folder).info.seconds == {}
    (folder / TIMINGS).unlink()
    assert verify_index(folder) == []
