"""N-gram overlap against an obvious reference."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.corpus import NgramOverlap
from ttt_adapt.corpus.contamination import words
from ttt_adapt.errors import SettingsError


def reference(query: str, text: str, ngram_size: int) -> float:
    ours, theirs = words(query), words(text)
    size = min(ngram_size, len(ours), len(theirs))
    if size == 0:
        return 0.0
    windows = [theirs[start : start + size] for start in range(len(theirs) - size + 1)]
    found = [
        any(ours[start : start + size] == window for start in range(len(ours) - size + 1))
        for window in windows
    ]
    return sum(found) / len(found)


def test_words() -> None:
    assert words("Hello, World_2! don't") == ["hello", "world_2", "don", "t"]
    assert words("中文ABCかな 한국어 Straße") == ["中", "文", "abc", "か", "な", "한국어", "straße"]
    assert words("ＡＢ 𠀀𠀁 ...") == ["ａｂ", "𠀀", "𠀁"]


@pytest.mark.parametrize(
    ("query", "text", "expected"),
    [
        ("a b c d e", "a b c d e", 1.0),
        ("A B, C d e", "x a b c y", 1 / 3),
        ("a b c", "d e f", 0.0),
        ("a b a b", "b a b a b a", 1.0),
        ("x a b y", "a b", 1.0),
        ("x a b y", "b a", 0.0),
        ("a b", "a b c a b", 2 / 4),
        ("", "a", 0.0),
        ("a", "", 0.0),
        ("...", "...", 0.0),
        ("床前明月光", "明月光", 1.0),
        ("床前明月光疑是", "地前明月光上", 2 / 4),
    ],
)
def test_fractions(query: str, text: str, expected: float) -> None:
    assert NgramOverlap(query, 3).fraction(text) == pytest.approx(expected)


TEXT = st.text(st.sampled_from("aAbc,  中文"), max_size=40)


@given(TEXT, TEXT, st.integers(1, 9))
@settings(deadline=None, max_examples=300)
def test_equals_the_reference(query: str, text: str, ngram_size: int) -> None:
    overlap = NgramOverlap(query, ngram_size)
    assert overlap.fraction(text) == pytest.approx(reference(query, text, ngram_size))
    assert overlap.fraction(query) == (1.0 if words(query) else 0.0)


def test_a_passage_of_the_query_is_all_overlap() -> None:
    query = " ".join(f"w{number % 97} v{number}" for number in range(3000))
    passage = query[1000:2200]
    inner = passage[passage.index(" ") : passage.rindex(" ")]
    assert NgramOverlap(query, 8).fraction(inner) == 1.0


def test_the_size_is_checked() -> None:
    with pytest.raises(SettingsError, match="ngram_size: expected at least 1, found 0"):
        NgramOverlap("a", 0)
