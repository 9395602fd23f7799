"""Passages: exact tiling, sizes, boundaries, overlap, linear time."""

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.config import ChunkSettings
from ttt_adapt.corpus import chunk_documents
from ttt_adapt.corpus.chunking import SEGMENT_CHARACTERS, Offsets
from ttt_adapt.errors import SettingsError
from ttt_adapt.testing import tiny_tokenizer
from ttt_adapt.types import Document, Passage

TEXT = st.text(st.sampled_from("ab \n\nü中🙂"), max_size=120)


def cut(text: str, offsets: Offsets | None = None, **values: object) -> list[str]:
    chosen = ChunkSettings.model_validate(values)
    passages = chunk_documents([Document(id="d", text=text)], chosen, offsets=offsets)
    return [passage.text for passage in passages]


def byte_offsets(text: str) -> Sequence[tuple[int, int]]:
    """Spans of a byte-level tokenizer with one token a byte: a character's tokens share its span."""
    tokenizer = tiny_tokenizer().backend_tokenizer
    spans: Sequence[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
    return spans


def word_offsets(text: str) -> Sequence[tuple[int, int]]:
    """Spans of words without the white space between them, after an empty special token."""
    import re

    return [(0, 0), *(match.span() for match in re.finditer(r"\S+", text))]


def test_passages_carry_their_document() -> None:
    documents = [
        Document(id="a", text="x" * 25, source="f:1", subset="s"),
        Document(id="b", text="y"),
    ]
    passages = list(chunk_documents(documents, ChunkSettings(size=10, min_size=0)))
    assert passages[0] == Passage("a#0", "a", 0, "x" * 10, "f:1", "s")
    assert [p.id for p in passages] == ["a#0", "a#1", "a#2", "b#0"]


def test_prefers_natural_ends() -> None:
    head = "a" * 88
    paragraph = head + "\n\nb\n b b" + "c" * 20
    assert cut(paragraph, size=100, min_size=0)[0] == head + "\n\n"
    line = head + "bb\nb b" + "c" * 20
    assert cut(line, size=100, min_size=0)[0] == head + "bb\n"
    space = head + "bb b b" + "c" * 20
    assert cut(space, size=100, min_size=0)[0] == head + "bb b"
    nothing = "a" * 80 + " " + "b" * 100
    assert cut(nothing, size=100, min_size=0)[0] == nothing[:100]
    exact = "a" * 100 + " " + "b" * 50
    assert cut(exact, size=100, min_size=0) == ["a" * 100, " " + "b" * 50]


def test_a_short_last_piece_is_dropped_unless_it_is_the_only_one() -> None:
    assert cut("a" * 131, size=100, min_size=32) == ["a" * 100]
    assert cut("a" * 132, size=100, min_size=32) == ["a" * 100, "a" * 32]
    assert cut("a", size=100, min_size=32) == ["a"]
    assert cut("", size=100) == []
    assert cut("a b c d", word_offsets, unit="tokens", size=3, min_size=2) == ["a b c "]
    assert cut("a", word_offsets, unit="tokens", size=3, min_size=2) == ["a"]


@given(TEXT, st.integers(1, 40))
@settings(deadline=None, max_examples=300)
def test_bytes_tile_the_text(text: str, size: int) -> None:
    pieces = cut(text, size=size, min_size=0)
    assert "".join(pieces) == text
    for piece in pieces:
        assert piece
        assert len(piece.encode()) <= size or len(piece) == 1
    for piece in pieces[:-1]:
        assert len(piece.encode()) > size * 0.85 - 4 or len(piece) == 1


@given(TEXT, st.integers(1, 40), st.data())
@settings(deadline=None, max_examples=300)
def test_bytes_overlap_as_asked(text: str, size: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, size - 1))
    pieces = cut(text, size=size, overlap=overlap, min_size=0)
    raw = text.encode()
    boundaries = [len(text[:position].encode()) for position in range(len(text) + 1)]
    begins = ends = 0
    for number, piece in enumerate(pieces):
        chunk = piece.encode()
        if number:
            # As early as the overlap allows, if the character after the last end still fits.
            new = len(raw[ends:].decode()[0].encode())
            earliest = max(ends - overlap, begins + 1, ends + new - size)
            begins = next(b for b in boundaries if b >= min(earliest, ends))
        assert raw[begins : begins + len(chunk)] == chunk
        assert begins + len(chunk) > ends
        ends = begins + len(chunk)
    assert ends == len(raw)


@given(TEXT, st.integers(1, 12), st.sampled_from([byte_offsets, word_offsets]))
@settings(deadline=None, max_examples=300)
def test_tokens_tile_the_text(text: str, size: int, offsets: Offsets) -> None:
    pieces = cut(text, offsets, unit="tokens", size=size, min_size=0)
    assert "".join(pieces) == text
    for piece in pieces:
        num_tokens = sum(end > start for start, end in offsets(piece))
        assert num_tokens <= size or len(piece.strip()) <= 1


@given(TEXT, st.integers(2, 12), st.data())
@settings(deadline=None, max_examples=200)
def test_tokens_overlap_as_asked(text: str, size: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, size - 1))
    pieces = cut(text, word_offsets, unit="tokens", size=size, overlap=overlap, min_size=0)
    words = text.split()
    first = 0
    for number, piece in enumerate(pieces):
        assert piece.split() == words[first : first + size]
        is_last = first + size >= len(words)
        assert is_last == (number == len(pieces) - 1)
        first += size - overlap


@given(st.text("abcdefghiü中🙂éß漢", max_size=40).map(dict.fromkeys), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=200)
def test_each_passage_brings_something_new(
    characters: dict[str, None], size: int, data: st.DataObject
) -> None:
    text = "".join(characters)
    overlap = data.draw(st.integers(0, size - 1))
    for unit in ("bytes", "tokens"):
        pieces = cut(text, byte_offsets, unit=unit, size=size, overlap=overlap, min_size=0)
        spans = [(text.index(piece), text.index(piece) + len(piece)) for piece in pieces]
        ends = [0, *(end for _, end in spans)]
        assert ends == sorted(set(ends))
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert len(text[start:end].encode()) <= overlap
        assert ends[-1] == len(text)


def test_segments_change_nothing_for_words() -> None:
    words = [f"w{number}" for number in range(SEGMENT_CHARACTERS // 3)]
    text = " ".join(words)
    assert len(text) > SEGMENT_CHARACTERS
    for size, overlap in ((100, 0), (100, 37), (60_000, 10)):
        pieces = cut(text, word_offsets, unit="tokens", size=size, overlap=overlap, min_size=0)
        starts = range(0, len(words), size - overlap)
        expected = [words[start : start + size] for start in starts]
        while len(expected) > 1 and len(expected[-2]) < size:
            expected.pop()
        if len(expected) > 1 and starts[len(expected) - 2] + size == len(words):
            expected.pop()
        assert [piece.split() for piece in pieces] == expected
        if not overlap:
            assert "".join(pieces) == text


def test_segments_of_one_long_word() -> None:
    text = "x" * (3 * SEGMENT_CHARACTERS)
    assert cut(text, word_offsets, unit="tokens", size=5) == [text]


def test_text_without_tokens_is_one_piece() -> None:
    assert cut(" \n ", word_offsets, unit="tokens", size=5) == [" \n "]


def test_tokens_need_offsets() -> None:
    with pytest.raises(SettingsError, match="expected a tokenizer's offsets, found none"):
        chunk_documents([], ChunkSettings(unit="tokens"))


@pytest.mark.parametrize("word", ["word ", "x", "中文", "\n", " "])
def test_time_is_linear(word: str) -> None:
    text = word * (8_000_000 // len(word.encode()))
    started = time.process_time()
    pieces = cut(text, min_size=0)
    assert time.process_time() - started < 4.0
    assert sum(len(piece) for piece in pieces) == len(text)
