"""Protocols: where a text is cut, and which texts are chosen."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.config import EvaluationSettings
from ttt_adapt.errors import SettingsError, UserError
from ttt_adapt.evaluation.protocols import choose_documents, cut, halve, make_query
from ttt_adapt.types import Document

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(deadline=None)
@given(texts, st.integers(0, 60))
def test_cut_is_the_longest_beginning_that_fits(text: str, max_bytes: int) -> None:
    kept = cut(text, max_bytes)
    longest = max(
        (text[:end] for end in range(len(text) + 1) if len(text[:end].encode()) <= max_bytes),
        key=len,
    )
    assert kept == longest


@settings(deadline=None)
@given(texts)
def test_halves_meet_at_the_boundary_nearest_the_middle(text: str) -> None:
    first, second = halve(text)
    assert first + second == text
    if not text:
        return
    assert second
    middle = len(text.encode()) / 2
    distances = [abs(len(text[:end].encode()) - middle) for end in range(len(text))]
    assert len(first) == distances.index(min(distances))


def test_halves_by_hand() -> None:
    assert halve("abcd") == ("ab", "cd")
    assert halve("abc") == ("a", "bc")
    assert halve("a🙂") == ("a", "🙂")
    assert halve("🙂a") == ("🙂", "a")
    assert halve("x") == ("", "x")


def test_full_and_split() -> None:
    document = Document("d", "abcdefgh", subset="code")
    full = make_query(document, EvaluationSettings())
    assert (full.query, full.context, full.text) == ("abcdefgh", "", "abcdefgh")
    split = make_query(document, EvaluationSettings(protocol="split"))
    assert (split.query, split.context, split.text) == ("abcd", "abcd", "efgh")
    assert (split.id, split.subset, split.whole) == ("d", "code", "abcdefgh")
    short = make_query(document, EvaluationSettings(protocol="split", max_bytes=4))
    assert (short.query, short.text, short.whole) == ("ab", "cd", "abcd")


def documents(num: int = 40) -> list[Document]:
    return [
        Document(f"d{i}", f"text {i}", subset="abc"[i % 3] if i % 4 else "a") for i in range(num)
    ]


def test_the_choice_does_not_depend_on_the_order_of_documents() -> None:
    chosen = choose_documents(documents(), per_subset=4, seed=1)
    shuffled = documents()
    random.Random(0).shuffle(shuffled)
    assert choose_documents(shuffled, per_subset=4, seed=1) == chosen
    assert choose_documents(documents(), per_subset=4, seed=2) != chosen
    assert sorted(document.subset for document in chosen) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_a_larger_choice_contains_a_smaller_one() -> None:
    few = choose_documents(documents(), per_subset=2, seed=0)
    many = choose_documents(documents(), per_subset=5, seed=0)
    assert many[: len(few)] == few
    every = choose_documents(documents(), per_subset=None, seed=0)
    assert every[: len(few)] == few
    assert sorted(d.id for d in every) == sorted(d.id for d in documents())
    assert choose_documents(documents(), per_subset=1000, seed=0) == every


def test_beginnings_cover_the_subsets_evenly() -> None:
    chosen = choose_documents(documents(), per_subset=3, seed=0)
    assert [document.subset for document in chosen] == ["a", "b", "c"] * 3


def test_refusals() -> None:
    with pytest.raises(UserError, match="two documents have the id 'd'"):
        choose_documents([Document("d", "a"), Document("d", "b")], per_subset=None, seed=0)
    with pytest.raises(SettingsError, match="per_subset must be at least 1, found 0"):
        choose_documents([], per_subset=0, seed=0)
    with pytest.raises(SettingsError, match="max_bytes must not be negative, found -1"):
        cut("a", -1)
    with pytest.raises(UserError, match=r"a lone surrogate \(U\+D800\) at character 1"):
        halve("a\ud800")
    with pytest.raises(UserError, match="a lone surrogate"):
        cut("\udcffaa", 10)
