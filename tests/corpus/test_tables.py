"""Parquet and Arrow: columns, rows that cannot be used, damaged files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.errors import CorpusError
from ttt_adapt.types import Document

KINDS = ["parquet", "arrow_file", "arrow_stream", "feather"]


def write(folder: Path, table: pa.Table, kind: str, name: str = "t") -> Path:
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=100)
        return folder / f"{name}.parquet"
    if kind == "feather":
        pyarrow.feather.write_feather(table, folder / f"{name}.feather")
        return folder / f"{name}.feather"
    path = folder / f"{name}.arrow"
    make = pyarrow.ipc.new_file if kind == "arrow_file" else pyarrow.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return path


def read(path: Path, problems: ReadProblems | None = None, **values: Any) -> list[Document]:
    return list(read_documents(CorpusSettings(path=str(path), **values), problems=problems))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_documents(tmp_path: Path, kind: str) -> None:
    table = pa.table(
        {
            "wide": list(range(300)),
            "text": [f"text {number} ü" for number in range(300)],
            "meta": [{"pile_set_name": f"S{number % 2}", "x": 0.5} for number in range(300)],
        }
    )
    path = write(tmp_path, table, kind)
    documents = read(path)
    assert [d.text for d in documents] == table["text"].to_pylist()
    assert [d.id for d in documents] == [f"{path.name}:{row}" for row in range(1, 301)]
    assert documents[3].subset == "S1"
    assert documents[3].meta == {"meta": {"pile_set_name": "S1", "x": 0.5}}
    assert [d.text for d in read(tmp_path, max_documents=2)] == ["text 0 ü", "text 1 ü"]


@pytest.mark.parametrize("kind", KINDS)
def test_column_choice(tmp_path: Path, kind: str) -> None:
    table = pa.table({"body": ["a", "b"], "key": [10, 11], "topic": ["x", None]})
    path = write(tmp_path, table, kind)
    documents = read(path, text_column="body", id_column="key", subset_column="topic")
    assert [(d.id, d.text, d.subset) for d in documents] == [("10", "a", "x"), ("11", "b", "")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "no column 'text'; found: body, key"),
        ({"text_column": "body", "id_column": "url"}, "no column 'url'; found: body, key"),
        ({"text_column": "body", "subset_column": "a.b"}, "no column 'a.b'; found: body, key"),
        ({"text_column": "key"}, "column 'key': expected strings, found int64; columns: body, key"),
    ],
)
def test_missing_columns_name_those_found(
    tmp_path: Path, kind: str, values: Any, reason: str
) -> None:
    path = write(tmp_path, pa.table({"body": ["a"], "key": [1]}), kind)
    with pytest.raises(CorpusError) as caught:
        read(path, **values)
    assert str(caught.value).startswith(f"{path.name}: {reason}")
    with pytest.raises(CorpusError, match="no document found") as caught:
        read(path, on_error="skip", **values)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_kinds_of_strings(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)})
    assert [d.text for d in read(write(tmp_path, table, "arrow_file"))] == ["a", "b", "a"]
    assert [d.text for d in read(write(tmp_path, table, "parquet"))] == ["a", "b", "a"]


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", None, "  ", "long " * 50, "e"]})
    path = write(tmp_path, table, "parquet")
    found = ReadProblems()
    documents = read(path, found, on_error="skip", max_document_bytes=100)
    assert [d.id for d in documents] == ["t.parquet:1", "t.parquet:5"]
    assert (found.num_empty, found.num_skipped) == (1, 2)
    assert [(p.location, p.reason) for p in found.problems] == [
        ("t.parquet:2", "column 'text': expected a string, found null"),
        ("t.parquet:4", "longer than max_document_bytes (100 bytes)"),
    ]


def test_invalid_utf8_costs_one_row(tmp_path: Path) -> None:
    data = pa.array([b"ok", b"caf\xe9", b"also"], pa.binary()).buffers()
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, data)})
    found = ReadProblems()
    documents = read(write(tmp_path, table, "parquet"), found, on_error="skip")
    assert [d.text for d in documents] == ["ok", "also"]
    assert found.problems[0].location == "t.parquet:2"
    assert found.problems[0].reason.startswith("invalid UTF-8 at byte 3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["empty", "noise", "half", "flip"])
def test_damaged_files(tmp_path: Path, kind: str, damage: str) -> None:
    table = pa.table({"text": [f"text {number}" for number in range(500)]})
    path = write(tmp_path, table, kind)
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = {
        "empty": b"",
        "noise": b"\x17noise" * 100,
        "half": data[:middle],
        "flip": data[:middle] + bytes(255 - b for b in data[middle : middle + 400])
        + data[middle + 400 :],
    }  # fmt: skip
    path.write_bytes(damaged[damage])
    found = ReadProblems()
    # Some damage hits nothing but text; what must never happen is another exception or a crash.
    try:
        read(path, found, on_error="skip")
    except CorpusError as error:
        assert "no document found" in str(error)
    if damage in ("empty", "noise"):
        with pytest.raises(CorpusError, match=rf"^{path.name}(:\d+)?: cannot be read"):
            read(path)


def test_values_json_does_not_know(tmp_path: Path) -> None:
    import datetime

    when = datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)
    table = pa.table(
        {"text": ["a"], "meta": [{"at": when, "score": float("nan"), "tags": ["x", b"y"][:1]}]}
    )
    (document,) = read(write(tmp_path, table, "parquet"))
    assert document.meta["meta"]["score"] is None
    assert document.meta["meta"]["at"].startswith("2020-01-02")
    assert document.meta["meta"]["tags"] == ["x"]


def test_files_saved_by_datasets(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_dict({"text": ["one", "two"], "subset": ["s", "t"]})
    data.save_to_disk(str(tmp_path / "saved"))
    documents = read(tmp_path / "saved")
    assert [(d.text, d.subset) for d in documents] == [("one", "s"), ("two", "t")]
    assert documents[0].id == "data-00000-of-00001.arrow:1"
