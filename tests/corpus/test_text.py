"""Plain text: whole files, separator lines, encodings, limits."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.errors import CorpusError
from ttt_adapt.types import Document

END = "<|endoftext|>"
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".zst": zstandard.compress,
    ".gz": gzip.compress,
}


def read(path: Path, problems: ReadProblems | None = None, **values: Any) -> list[Document]:
    return list(read_documents(CorpusSettings(path=str(path), **values), problems=problems))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.txt.gz", "a.md", "a.rst"])
def test_a_file_is_a_document(tmp_path: Path, name: str) -> None:
    text = "One\r\n\nTwo ü\n"
    pack = PACKERS.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(text.encode()))
    assert read(tmp_path / name) == [Document(id=name, text=text, source=name)]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\n")
    assert read(tmp_path / "a.txt")[0].text == "a\n"
    assert read(tmp_path / "a.txt", separator=END)[0].text == "a\n"


@pytest.mark.parametrize("suffix", ["", ".zst", ".gz"])
def test_separator_lines_end_documents(tmp_path: Path, suffix: str) -> None:
    data = f"a\nb\n{END}\n \n{END}\r\n{END} no\nc\n{END}\nlast".encode()
    pack = PACKERS.get(suffix, bytes)
    name = f"n.txt{suffix}"
    (tmp_path / name).write_bytes(pack(data))
    found = ReadProblems()
    documents = read(tmp_path / name, found, separator=END)
    assert [(d.id, d.source, d.text) for d in documents] == [
        (f"{name}:1", f"{name}:1", "a\nb\n"),
        (f"{name}:3", f"{name}:6", f"{END} no\nc\n"),
        (f"{name}:4", f"{name}:9", "last"),
    ]
    assert found.num_empty == 1


def test_nothing_follows_a_last_separator(tmp_path: Path) -> None:
    for end in (END, END + "\n"):
        (tmp_path / "n.txt").write_text(f"a\n{end}", encoding="utf-8")
        found = ReadProblems()
        assert len(read(tmp_path / "n.txt", found, separator=END)) == 1
        assert found.num_empty == 0


def test_an_empty_line_can_separate(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("a\nb\n\nc\n", encoding="utf-8")
    assert [d.text for d in read(tmp_path / "n.txt", separator="")] == ["a\nb\n", "c\n"]


def test_a_separator_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("a", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"separator: expected one line, found '\\n\\n'"):
        read(tmp_path / "n.txt", separator="\n\n")


def test_invalid_utf8_names_byte_and_line(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_bytes(
        f"a\n{END}\nb\ncaf".encode() + b"\xe9\n" + END.encode() + b"\nc"
    )
    found = ReadProblems()
    texts = [d.text for d in read(tmp_path / "n.txt", found, separator=END, on_error="skip")]
    assert texts == ["a\n", "c"]
    assert found.problems[0].location == "n.txt:3"
    assert found.problems[0].reason.startswith("invalid UTF-8 at byte 5, line 4: 0xe9")
    with pytest.raises(CorpusError, match=r"^n.txt: invalid UTF-8 at byte \d+, line 4: 0xe9"):
        read(tmp_path / "n.txt")


def test_too_long_documents(tmp_path: Path) -> None:
    short = "ok\n"
    long_line, long_lines = "x" * 50_000 + "\n", "word\n" * 10_000
    data = f"{short}{END}\n{long_line}{END}\n{long_lines}{END}\n{short}"
    (tmp_path / "n.txt").write_text(data, encoding="utf-8")
    found = ReadProblems()
    values = {"separator": END, "max_document_bytes": 20_000, "on_error": "skip"}
    documents = read(tmp_path / "n.txt", found, **values)
    assert [d.id for d in documents] == ["n.txt:1", "n.txt:4"]
    assert [p.location for p in found.problems] == ["n.txt:3", "n.txt:5"]
    reason = "longer than max_document_bytes (20,000 bytes)"
    assert {p.reason for p in found.problems} == {reason}
    with pytest.raises(CorpusError, match=r"n.txt: longer than max_document_bytes"):
        read(tmp_path / "n.txt", max_document_bytes=20_000)


@pytest.mark.parametrize(("size", "limit"), [(10, 10), (10_000, 10_000), (2_500_000, 2_500_000)])
def test_the_limit_is_exact(tmp_path: Path, size: int, limit: int) -> None:
    (tmp_path / "n.txt").write_bytes(b"x" * size)
    assert len(read(tmp_path / "n.txt", max_document_bytes=limit)[0].text) == size
    with pytest.raises(CorpusError, match="longer than max_document_bytes"):
        read(tmp_path / "n.txt", max_document_bytes=limit - 1)
    (tmp_path / "n.txt").write_bytes(b"x" * size + b"\n" + END.encode() + b"\n")
    assert len(read(tmp_path / "n.txt", separator=END, max_document_bytes=limit + 1)) == 1
    with pytest.raises(CorpusError, match="longer than max_document_bytes"):
        read(tmp_path / "n.txt", separator=END, max_document_bytes=limit)


@pytest.mark.parametrize("separator", [None, END])
def test_truncated_stream(tmp_path: Path, separator: str | None) -> None:
    data = zstandard.compress(f"a\n{END}\n".encode() * 3)
    (tmp_path / "n.txt.zst").write_bytes(data[:-2])
    with pytest.raises(CorpusError, match=r"^n.txt.zst(:\d+)?: cannot be read"):
        read(tmp_path / "n.txt.zst", separator=separator)


@given(st.lists(st.text(st.sampled_from("ab \n\r🙂<")), min_size=1, max_size=8), st.booleans())
@settings(deadline=None, max_examples=100)
def test_separated_documents_are_what_was_joined(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], closed: bool
) -> None:
    texts = [text + "\n" if text and not text.endswith("\n") else text for text in texts]
    path = tmp_path_factory.mktemp("joined") / "n.txt"
    joined = f"{END}\n".join(texts) + (f"{END}\n" if closed else "")
    path.write_bytes(joined.encode())
    expected = [(f"n.txt:{i}", text) for i, text in enumerate(texts, 1) if text.strip()]
    if expected:
        assert [(d.id, d.text) for d in read(path, separator=END)] == expected
