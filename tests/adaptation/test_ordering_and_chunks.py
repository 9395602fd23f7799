"""Training order, chunks and prefixes against their plain definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.adaptation import listing_order, training_order
from ttt_adapt.adaptation.chunks import make_curriculum, make_prefix
from ttt_adapt.errors import SettingsError
from ttt_adapt.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def tokens(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def test_orders() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.9], dtype=np.float32)
    assert training_order(scores, "nearest-first", 0).tolist() == [1, 3, 2, 0]
    assert training_order(scores, "farthest-first", 0).tolist() == [0, 2, 1, 3]
    assert training_order(scores, "as-selected", 0).tolist() == [0, 1, 2, 3]
    found = training_order(np.zeros(40), "random", 7)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(40))
    assert found.tolist() == training_order(np.ones(40), "random", 7).tolist()
    assert found.tolist() != training_order(np.zeros(40), "random", 8).tolist()
    assert training_order(np.zeros(0), "nearest-first", 0).shape == (0,)


@pytest.mark.parametrize(
    ("method", "order", "expected"),
    [
        ("full", None, "as-selected"),
        ("lora", None, "as-selected"),
        ("full", "nearest-first", "nearest-first"),
        ("full", "farthest-first", "farthest-first"),
        ("in-context", None, "nearest-first"),
        ("in-context", "random", "nearest-first"),
        ("fast-weights", None, "nearest-first"),
        ("fast-weights", "farthest-first", "nearest-first"),
        ("fast-weights", "as-selected", "as-selected"),
    ],
)
def test_order_each_method_wants(method: str, order: str | None, expected: str) -> None:
    assert listing_order(method, order) == expected


def test_order_refusals() -> None:
    with pytest.raises(SettingsError, match="found 'best'"):
        training_order(np.zeros(2), "best", 0)
    with pytest.raises(SettingsError, match="1 non-finite"):
        training_order(np.array([0.0, np.nan]), "nearest-first", 0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text(max_size=40), max_size=5),
    st.integers(1, 17),
    st.integers(1, 3),
    st.integers(0, 12),
)
def test_chunks_cover_every_token_once_per_epoch(
    texts: list[str], length: int, epochs: int, most: int
) -> None:
    found = make_curriculum(TOKENIZER, texts, max_length=length, epochs=epochs, most=most)
    passages = (texts * epochs)[:most]
    assert found.num_passages == len(passages)
    for position, text in enumerate(passages):
        pieces = found.chunks[found.ends[position] : found.ends[position + 1]]
        assert [token for piece in pieces for token in piece[1:].tolist()] == tokens(text)
        assert all(piece[0] == 0 and 2 <= len(piece) <= length + 1 for piece in pieces)
    for step in range(most + 2):
        done = found.num_chunks(step)
        assert found.passages_done(done, step) == min(step, len(passages))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(alphabet="ab é", max_size=5), max_size=6), st.integers(0, 40))
def test_prefix_is_the_tail_of_farthest_to_nearest(texts: list[str], most: int) -> None:
    nearest_of_each = [text for at, text in enumerate(texts) if text not in texts[:at]]
    whole = [t for text in reversed(nearest_of_each) for t in (*tokens(text), *tokens("\n\n"))]
    assert make_prefix(TOKENIZER, texts, max_tokens=most) == tuple(whole[len(whole) - most :]) or (
        len(whole) <= most and make_prefix(TOKENIZER, texts, max_tokens=most) == tuple(whole)
    )
