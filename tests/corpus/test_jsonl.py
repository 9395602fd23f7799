"""JSON lines: what is read, under which ids, and every kind of malformed line."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.corpus.jsonl import parse_object
from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.errors import CorpusError
from ttt_adapt.types import Document

PILE = [
    {"text": "first\n", "meta": {"pile_set_name": "Books", "source": "a"}},
    {"text": "zweite ü 中 🙂", "meta": {"pile_set_name": "Wiki"}},
]


def read(path: Path, problems: ReadProblems | None = None, **values: Any) -> list[Document]:
    return list(read_documents(CorpusSettings(path=str(path), **values), problems=problems))


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def compress(data: bytes, suffix: str) -> bytes:
    if suffix.endswith(".zst"):
        # Two frames in one file, as concatenated downloads are.
        half = len(data) // 2
        pack = zstandard.ZstdCompressor().compress
        return pack(data[:half]) + pack(data[half:])
    return gzip.compress(data) if suffix.endswith(".gz") else data


def test_a_prefix_begins_every_id(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(lines([{"text": "a", "id": "own"}, {"text": "b"}, {"text": "c", "id": "own"}]))
    found = read(path, id_prefix="2026/")
    assert [d.id for d in found] == ["2026/own", "2026/train.jsonl:2", "2026/train.jsonl:3"]
    assert [d.source for d in found] == ["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson"])
def test_pile_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    path.write_bytes(compress(lines(PILE), suffix))
    found = ReadProblems()
    first, second = read(path, found)
    assert first == Document(
        id=f"train{suffix}:1",
        text="first\n",
        source=f"train{suffix}:1",
        subset="Books",
        meta={"meta": {"pile_set_name": "Books", "source": "a"}},
    )
    assert (second.id, second.subset) == (f"train{suffix}:2", "Wiki")
    assert (found.num_documents, found.num_bytes) == (2, 6 + len("zweite ü 中 🙂".encode()))
    assert (found.num_files, found.num_empty, found.num_skipped) == (1, 0, 0)


@pytest.mark.parametrize(
    ("row", "values", "identifier", "subset"),
    [
        ({"text": "a", "subset": "s"}, {}, "x.jsonl:1", "s"),
        ({"text": "a", "id": 7}, {}, "7", ""),
        ({"text": "a", "id": "i", "meta": {"id": "m"}}, {}, "m", ""),
        ({"text": "a", "id": ""}, {}, "x.jsonl:1", ""),
        ({"text": "a", "id": {"deep": 1}}, {}, "x.jsonl:1", ""),
        ({"body": "a", "url": "u"}, {"text_column": "body", "id_column": "url"}, "u", ""),
        ({"d": {"body": "a"}, "k": 3}, {"text_column": "d.body", "subset_column": "k"}, None, "3"),
        ({"text": "a", "m": {"s": "x"}, "m.s": "flat"}, {"subset_column": "m.s"}, None, "flat"),
        ({"text": "a", "s": None}, {"subset_column": "s"}, None, ""),
    ],
)
def test_columns(
    tmp_path: Path, row: Any, values: Any, identifier: str | None, subset: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines([row]))
    (document,) = read(path, **values)
    assert document.text == "a"
    assert document.id == (identifier or "x.jsonl:1")
    assert document.subset == subset


GOOD = b'{"text": "good"}'
MALFORMED = {
    "not_json": (b'{"text": "a"', "not valid JSON: Expecting ',' delimiter at column 13"),
    "list": (b'["text"]', "expected a JSON object, found a list"),
    "null": (b"null", "expected a JSON object, found null"),
    "no_column": (b'{"body": "a", "n": 1}', "no column 'text'; found: body, n"),
    "no_columns": (b"{}", "no column 'text'; found: none"),
    "number": (b'{"text": 3}', "column 'text': expected a string, found an integer"),
    "missing_value": (b'{"text": null}', "column 'text': expected a string, found null"),
    "nan": (b'{"text": "a", "score": NaN}', "not valid JSON: the constant NaN"),
    "infinity": (b'{"text": "a", "x": [-Infinity]}', "not valid JSON: the constant -Infinity"),
    "overflow": (b'{"text": "a", "x": 1e999}', "a number beyond a double's range: 1e999"),
    "surrogate": (b'{"text": "a\\ud800b"}', "an unpaired surrogate (\\ud800 to \\udfff)"),
    "surrogate_upper": (b'{"text": "a\\uDC00"}', "an unpaired surrogate"),
    "surrogate_in_meta": (b'{"text": "a", "meta": {"t": "\\ud83d"}}', "an unpaired surrogate"),
    "surrogate_bytes": (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8 at byte 10: 0xed"),
    "utf8": (b'{"text": "caf\xe9"}', "invalid UTF-8 at byte 13: 0xe9"),
    "bom_inside": (b'\xef\xbb\xbf{"text": "a"}', "not valid JSON"),
    "deep": (b'{"text": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "huge_integer": (b'{"text": "a", "x": ' + b"1" * 5000 + b"}", "a number that cannot be read"),
    "too_long": (b'{"text": "' + b"a" * 500_000 + b'"}', "longer than max_document_bytes"),
    "nul": (b"\0\0\0", "not valid JSON"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_malformed_line(tmp_path: Path, case: str, suffix: str) -> None:
    bad, reason = MALFORMED[case]
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(compress(GOOD + b"\n" + bad + b"\n" + GOOD + b"\n", suffix))
    found = ReadProblems()
    documents = read(path, found, on_error="skip", max_document_bytes=450_000)
    assert [document.id for document in documents] == [f"bad{suffix}:1", f"bad{suffix}:3"]
    assert found.num_skipped == 1
    assert found.problems[0].location == f"bad{suffix}:2"
    assert reason in found.problems[0].reason
    assert "\n" not in found.problems[0].reason
    with pytest.raises(CorpusError) as caught:
        read(path, max_document_bytes=450_000)
    assert str(caught.value).startswith(f"bad{suffix}:2: ")
    assert reason in str(caught.value)
    assert "on_error" in str(caught.value)


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "dos.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n   \n" + GOOD)
    assert [document.id for document in read(path)] == ["dos.jsonl:1", "dos.jsonl:4"]


def test_paired_surrogates_are_a_character(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "\\ud83d\\ude42"}\n')
    assert read(path)[0].text == "🙂"


def test_empty_documents_are_counted_not_yielded(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines([{"text": ""}, {"text": " \n\t\u2003"}, {"text": " a "}]))
    found = ReadProblems()
    assert [document.text for document in read(path, found)] == [" a "]
    assert (found.num_empty, found.num_skipped) == (2, 0)
    assert found.summary() == "1 document (0.0 MB); 2 empty documents left out"


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": " "}\n'])
def test_zero_documents(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"no document found \(read as jsonl: 1 files"):
        read(path)


def test_zero_documents_name_the_first_problem(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"body": "a"}\n{"body": "b"}\n{"text": ""}\n')
    expected = (
        r"1 files, 1 empty documents, 2 malformed records\); the first malformed record is "
        r"x.jsonl:1: no column 'text'; found: body"
    )
    with pytest.raises(CorpusError, match=expected):
        read(path, ReadProblems(num_files=5, num_empty=3), on_error="skip")


def test_duplicate_ids_of_an_id_column_are_malformed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines([{"text": t, "k": k} for t, k in (("a", "i"), ("b", "j"), ("c", "i"))]))
    found = ReadProblems()
    assert [d.text for d in read(path, found, id_column="k", on_error="skip")] == ["a", "b"]
    assert found.problems[0].location == "x.jsonl:3"
    with pytest.raises(CorpusError, match=r"x.jsonl:3: id 'i' is another document's already"):
        read(path, id_column="k")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, "no column 'k'; found: text"),
        ({"text": "a", "k": None}, "expected an id (a string or an integer), found null"),
        ({"text": "a", "k": ""}, "found an empty string"),
        ({"text": "a", "k": 1.5}, "found a number"),
        ({"text": "a", "k": True}, "found a boolean"),
    ],
)
def test_an_id_column_must_hold_ids(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines([row]))
    with pytest.raises(CorpusError) as caught:
        read(path, id_column="k")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a", "meta": {}}, "no column 'meta.domain'; found: text, meta"),
        ({"text": "a", "meta": {"domain": []}}, "expected a name (a string or an integer)"),
    ],
)
def test_a_subset_column_must_hold_names(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines([row]))
    with pytest.raises(CorpusError) as caught:
        read(path, subset_column="meta.domain")
    assert reason in str(caught.value)


def test_ids_not_asked_for_give_way_to_positions(tmp_path: Path) -> None:
    rows = [{"id": "x.jsonl:3"}, {"id": "a"}, {}, {"id": "a"}, {"id": "y.jsonl:1"}]
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines([{"text": "t", **row} for row in rows]))
    ids = [document.id for document in read(path)]
    assert ids == ["x.jsonl:1", "a", "x.jsonl:3", "x.jsonl:4", "y.jsonl:1"]


@given(
    st.lists(
        st.one_of(st.none(), st.sampled_from(["a", "b", "x.jsonl:1", "x.jsonl:2", "x.jsonl:4"]))
    )
)
@settings(deadline=None, max_examples=60)
def test_ids_are_unique_and_the_same_again(
    tmp_path_factory: pytest.TempPathFactory, own: list[str | None]
) -> None:
    path = tmp_path_factory.mktemp("ids") / "x.jsonl"
    rows = [{"text": "t"} | ({} if name is None else {"id": name}) for name in [None, *own]]
    path.write_bytes(lines(rows))
    ids = [document.id for document in read(path)]
    assert len(set(ids)) == len(ids) == len(rows)
    assert ids == [document.id for document in read(path)]


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
@pytest.mark.parametrize("kept", [1, 2, 5, 0.3, 0.7, -1])
def test_truncated_stream(tmp_path: Path, suffix: str, kept: float) -> None:
    rows = [{"text": f"{number} {zlib.crc32(bytes([number % 251]) * 9)}"} for number in range(9000)]
    data = lines(rows)
    pack = zstandard.ZstdCompressor().compress if suffix == ".jsonl.zst" else gzip.compress
    whole = pack(data)
    path = tmp_path / f"cut{suffix}"
    cut = whole[:kept] if isinstance(kept, int) else whole[: int(len(whole) * kept)]
    path.write_bytes(cut)
    found = ReadProblems()
    try:
        documents = read(path, found, on_error="skip")
    except CorpusError as error:
        assert "no document found" in str(error)
        documents = []
    assert found.num_skipped == 1
    assert found.problems[0].location == f"cut{suffix}:{len(documents) + 1}"
    assert "cannot be read on" in found.problems[0].reason
    assert [document.text for document in documents] == [r["text"] for r in rows[: len(documents)]]
    with pytest.raises(CorpusError, match=r"^cut.jsonl.\w+:\d+: cannot be read on: "):
        read(path)


def test_what_is_not_compressed_says_so(tmp_path: Path) -> None:
    for name in ("a.jsonl.zst", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(lines(PILE))
        with pytest.raises(CorpusError, match=rf"^{name}:1: cannot be read on: "):
            read(tmp_path / name)


def test_a_broken_file_does_not_hide_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines(PILE))[:-3])
    (tmp_path / "b.jsonl").write_bytes(lines(PILE))
    found = ReadProblems()
    ids = [document.id for document in read(tmp_path, found, on_error="skip")]
    assert ids[-2:] == ["b.jsonl:1", "b.jsonl:2"]
    assert found.num_skipped == 1


def test_a_file_that_vanishes_while_reading(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(PILE))
    found = ReadProblems()
    asked = CorpusSettings(path=str(tmp_path), on_error="skip")
    documents = read_documents(asked, problems=found)
    next(documents)
    (tmp_path / "b.jsonl").unlink()
    assert [document.id[:1] for document in documents] == ["a", "c", "c"]
    assert found.problems[0].location == "b.jsonl:1"
    assert "No such file or directory" in found.problems[0].reason


def test_max_documents_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD + b"\n\n" + GOOD + b"\nnot JSON\n")
    found = ReadProblems()
    assert len(read(path, found, max_documents=2)) == 2
    assert found.num_documents == 2


def test_problems_are_listed_up_to_a_limit_and_counted_beyond(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"bad\n" * 1500 + GOOD)
    found = ReadProblems()
    assert len(read(path, found, on_error="skip")) == 1
    assert (found.num_skipped, len(found.problems)) == (1500, 1000)
    assert found.summary() == (
        "1 document (0.0 MB); 1,500 malformed records skipped "
        "(first: x.jsonl:1: not valid JSON: Expecting value at column 1)"
    )


@given(st.lists(st.text(), min_size=1))
@settings(deadline=None, max_examples=60)
def test_text_is_exactly_the_string(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("exact") / "x.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    expected = [text for text in texts if text.strip()]
    if expected:
        assert [document.text for document in read(path)] == expected


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(GOOD)), max_size=12))
@settings(deadline=None, max_examples=150)
def test_any_bytes_have_a_defined_outcome(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    # An object at the front keeps the corpus from being empty.
    path.write_bytes(b"\n".join([GOOD, *pieces]))
    found = ReadProblems()
    documents = read(path, found, on_error="skip")
    data_lines = path.read_bytes().split(b"\n")
    outcomes = len(documents) + found.num_skipped + found.num_empty
    assert outcomes == sum(bool(line.strip(b" \t\r\n\x0b\x0c")) for line in data_lines)
    for document in documents:
        document.text.encode()
        number = int(document.source.rpartition(":")[2])
        assert json.loads(data_lines[number - 1])["text"] == document.text


@pytest.mark.parametrize("line", [b"3", b'"a"', b"2.5", b"true"])
def test_only_objects(line: bytes) -> None:
    with pytest.raises(Malformed, match="expected a JSON object, found a "):
        parse_object(line)


def test_of_repeated_keys_the_last_counts() -> None:
    assert parse_object(b'{"text": "a", "text": "b"}') == {"text": "b"}
