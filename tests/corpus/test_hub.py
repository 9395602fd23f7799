"""Hub data sets, through ``datasets`` itself on local directories laid out like them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.errors import CorpusError
from ttt_adapt.types import Document


def read(path: str, problems: ReadProblems | None = None, **values: Any) -> list[Document]:
    return list(read_documents(CorpusSettings(path=path, **values), problems=problems))


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    folder = tmp_path / "news"
    (folder / "data").mkdir(parents=True)
    rows = [{"body": f"b{n}", "url": f"u{n}", "subset": "s", "wide": [n]} for n in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data" / "train.jsonl").write_text(lines, encoding="utf-8")
    table = pa.table({"body": ["v0", None, " ", "v3"], "url": ["a", "b", "c", "a"]})
    pyarrow.parquet.write_table(table, folder / "validation.parquet")
    return folder


def test_streams_a_split_with_chosen_columns(data_set: Path) -> None:
    documents = read(f"hub:{data_set}/data", text_column="body", max_documents=3)
    assert [d.text for d in documents] == ["b0", "b1", "b2"]
    assert [d.id for d in documents] == ["data/train:1", "data/train:2", "data/train:3"]
    assert documents[0].subset == "s"
    assert documents[0].meta == {"subset": "s"}
    named = read(f"{data_set}/data", format="hub", text_column="body", id_column="url")
    assert [d.id for d in named] == ["u0", "u1", "u2", "u3", "u4"]


def test_rows_that_cannot_be_used(data_set: Path) -> None:
    (data_set / "data" / "train.jsonl").unlink()
    found = ReadProblems()
    values: dict[str, Any] = {"split": "validation", "text_column": "body", "id_column": "url"}
    documents = read(f"hub:{data_set}", found, on_error="skip", **values)
    assert [(d.id, d.text) for d in documents] == [("a", "v0")]
    assert found.num_empty == 1
    assert [(p.location, p.reason) for p in found.problems] == [
        ("news/validation:2", "column 'body': expected a string, found null"),
        ("news/validation:4", "id 'a' is another document's already; ids must be unique"),
    ]
    with pytest.raises(CorpusError, match=r"news/validation:2: column 'body': expected a string"):
        read(f"hub:{data_set}", **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"hub data set data/train: no column 'text'; found: body, url, subset, wide"),
        ({"split": "none"}, r"data/none: cannot be opened: Bad split: none. Available splits"),
        ({"hub_config": "cfg"}, r"data/cfg/train: cannot be opened: BuilderConfig 'cfg' not found"),
    ],
)
def test_what_is_not_there(data_set: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        read(f"hub:{data_set}/data", **values)


def test_a_directory_without_data(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="cannot be opened: .*check its name, hub_config and"):
        read(f"hub:{tmp_path}")


def test_a_builder_that_fails_on_the_way(data_set: Path) -> None:
    path = data_set / "data" / "train.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + "{bad\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"data/train:\d+: cannot be read on: ArrowInvalid: JSON"):
        read(f"hub:{data_set}/data", text_column="body")
