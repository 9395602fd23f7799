"""From paths to formats and files: suffixes, directories, patterns, mistakes."""

import json
import os
from pathlib import Path, PurePath
from typing import Any

import pytest

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.corpus.files import format_of, locate
from ttt_adapt.errors import CorpusError


def fill(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    return root


def ids(path: object, **values: Any) -> list[str]:
    return [d.id for d in read_documents(CorpusSettings(path=str(path), **values))]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "jsonl"), ("a.JSONL.GZ", "jsonl"), ("a.jsonl.zst", "jsonl"),
        ("a.ndjson", "jsonl"), ("a.b.txt", "text"), ("a.md.zst", "text"),
        ("a.parquet", "parquet"), ("a.arrow", "arrow"), ("a.feather", "arrow"),
        ("a.parquet.gz", None), ("a.json", None), ("a.zst", None), ("a", None), (".jsonl", None),
    ],
)  # fmt: skip
def test_suffixes(name: str, expected: str | None) -> None:
    assert format_of(PurePath(name)) == expected


def test_a_directory_of_data_files(tmp_path: Path) -> None:
    fill(tmp_path, "b.jsonl", "a/x.jsonl", "c/x.jsonl", "README.md", ".hidden/x.jsonl")
    fill(tmp_path, "x.jsonl.partial-1-ab", "dataset_info.json", ".DS_Store")
    (tmp_path / "x.jsonl.partial-1-ab").rename(tmp_path / "y.partial-1-ab.jsonl")
    assert ids(tmp_path) == ["b.jsonl:1", "a/x.jsonl:1", "c/x.jsonl:1"]


def test_files_of_one_name_in_different_folders_do_not_collide(tmp_path: Path) -> None:
    fill(tmp_path, "a/train.jsonl", "b/train.jsonl")
    for path in (tmp_path, tmp_path / "*" / "train.jsonl", tmp_path / "**" / "*.jsonl"):
        assert ids(path) == ["a/train.jsonl:1", "b/train.jsonl:1"]
    (tmp_path / "more.txt").write_text("x", encoding="utf-8")
    assert "a/train.jsonl" in ids(tmp_path)  # A tree now: files as they are.


def test_patterns(tmp_path: Path) -> None:
    fill(tmp_path, "t-1.jsonl", "t-0.jsonl", "v-0.jsonl", "t-dir.jsonl/inner")
    assert ids(tmp_path / "t-?.jsonl") == ["t-0.jsonl:1", "t-1.jsonl:1"]
    assert ids(tmp_path / "t*.jsonl") == ["t-0.jsonl:1", "t-1.jsonl:1"]
    with pytest.raises(CorpusError, match=r"u\*.jsonl: no file matches"):
        ids(tmp_path / "u*.jsonl")


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    fill(tmp_path, "part[1].jsonl")
    assert ids(tmp_path / "part[1].jsonl") == ["part[1].jsonl:1"]


def test_include_and_exclude_in_a_directory_of_data(tmp_path: Path) -> None:
    fill(tmp_path, "train/0.jsonl", "train/1.jsonl", "test/0.jsonl")
    assert ids(tmp_path, include=("train/",)) == ["train/0.jsonl:1", "train/1.jsonl:1"]
    assert ids(tmp_path, exclude=("1.jsonl", "test/")) == ["train/0.jsonl:1"]


def test_text_directories(tmp_path: Path) -> None:
    fill(tmp_path, "b.txt", "a.txt", "sub/c.txt")
    assert locate(CorpusSettings(path=str(tmp_path))).format == "text"
    assert ids(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    fill(tmp_path, "d.tex")
    assert locate(CorpusSettings(path=str(tmp_path))).format == "tree"
    assert ids(tmp_path, format="text") == ["a.txt", "b.txt", "sub/c.txt"]
    assert ids(tmp_path, format="text", include=("*.tex",)) == ["d.tex"]


def test_links_to_files_are_followed_in_directories_of_data(tmp_path: Path) -> None:
    fill(tmp_path, "blobs/0123", "snapshot/real.jsonl")
    (tmp_path / "snapshot" / "linked.jsonl").symlink_to(tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "loop").symlink_to(tmp_path / "snapshot")
    (tmp_path / "snapshot" / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    assert ids(tmp_path / "snapshot") == ["linked.jsonl:1", "real.jsonl:1"]


def test_a_format_that_is_told_counts(tmp_path: Path) -> None:
    fill(tmp_path, "data.json", "notes.log")
    assert ids(tmp_path / "data.json", format="jsonl") == ["data.json:1"]
    assert ids(tmp_path / "notes.log", format="text") == ["notes.log"]


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        ("nowhere.jsonl", {}, r"no such file or directory; a hub data set is written hub:owner"),
        ("data.json", {}, r"data.json: its suffix tells no format; known are .jsonl, .ndjson"),
        ("data.json", {"format": "tree"}, "format is 'tree': expected a directory, found a file"),
        ("", {"format": "parquet"}, r"no parquet files \(.parquet\); found: .json, .txt"),
        ("*", {}, "data.json: its suffix tells no format"),
        ("*.[pt]*", {}, r"files of several formats \(parquet, text\); set format or narrow"),
        ("pipe", {}, "pipe: expected a file or a directory, found something else"),
        ("", {"format": "text", "include": ("!",)}, r"include: .*expected gitignore-style"),
    ],
)
def test_mistakes_are_told_at_once(
    tmp_path: Path, path: str, values: dict[str, Any], message: str
) -> None:
    fill(tmp_path, "data.json", "more.txt")
    if "[" in path:
        fill(tmp_path, "table.parquet")
    if path == "pipe":
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match=message):
        # Not iterated: what cannot work is refused by the call itself.
        read_documents(CorpusSettings(path=str(tmp_path / path), **values))


def test_a_hub_name_with_another_format_is_refused() -> None:
    with pytest.raises(CorpusError, match="hub:a/b names a hub data set, but format is 'jsonl'"):
        read_documents(CorpusSettings(path="hub:a/b", format="jsonl"))


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no document found \(read as tree: empty\)"):
        ids(tmp_path)


def test_a_collector_serves_several_corpora(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", "b.jsonl")
    found = ReadProblems()
    for name in ("a.jsonl", "b.jsonl"):
        list(read_documents(CorpusSettings(path=str(tmp_path / name)), problems=found))
    assert (found.num_documents, found.num_files) == (2, 2)
