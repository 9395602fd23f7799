"""Feature hashing against a slow reference in plain integers, and its promises."""

import hashlib
import math
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.embedding import load_embedder
from ttt_adapt.embedding.hashing import CHARACTER_LIMIT, HashingEmbedder
from ttt_adapt.errors import CorpusError

TWO_64 = 2**64
BASE = 0x9E3779B97F4A7C15

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
source_text = st.text("ab_ .(\n\t=1é漢", max_size=200)


def mix(value: int) -> int:
    value = (value + BASE) % TWO_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % TWO_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % TWO_64
    return value ^ (value >> 31)


def ngram(units: list[int], family: int) -> int:
    value = (family * 0x100 + len(units)) * BASE % TWO_64
    for unit in units:
        value = (value * BASE + unit) % TWO_64
    return mix(value)


def word_hash(word: str) -> int:
    total = sum(mix(ord(letter)) * BASE**place for place, letter in enumerate(word))
    return mix((total + len(word)) % TWO_64)


def reference(text: str, dimension: int) -> np.ndarray:
    """One n-gram at a time, in Python's integers."""
    words = [word_hash(word) for word in re.findall(r"\w+|[^\w\s]", text.lower())]
    letters = [mix(ord(letter)) for letter in " " + " ".join(text.lower().split()) + " "]
    total = np.zeros(dimension)
    if words:
        for weight, units, family, sizes in (
            (0.25, words, 1, (1, 2)),
            (1.0, letters, 2, (3, 4, 5)),
        ):
            counts = Counter(
                ngram(units[start : start + size], family)
                for size in sizes
                for start in range(len(units) - size + 1)
            )
            vector = np.zeros(dimension)
            for feature, count in counts.items():
                sign = -1.0 if feature & 1 else 1.0
                vector[(feature >> 32) % dimension] += sign * (1.0 + math.log(count))
            if np.linalg.norm(vector) > 1e-9:
                total += weight * vector / np.linalg.norm(vector)
    if np.linalg.norm(total) < 1e-9:
        total[0] = 1.0
    return total / np.linalg.norm(total)


@settings(deadline=None, max_examples=60)
@given(source_text, st.sampled_from([64, 384]))
def test_equals_the_slow_reference(text: str, dimension: int) -> None:
    vector = HashingEmbedder(dimension).embed([text])[0]
    np.testing.assert_allclose(vector, reference(text, dimension), atol=1e-6)


def test_equals_the_slow_reference_on_code(passages: list[str]) -> None:
    vectors = HashingEmbedder(96).embed(passages[:20])
    expected = np.stack([reference(text, 96) for text in passages[:20]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.lists(any_text, max_size=5), st.integers(1, 500))
def test_every_text_has_a_unit_vector_of_its_own(texts: list[str], dimension: int) -> None:
    embedder = HashingEmbedder(dimension)
    vectors = embedder.embed(texts)
    assert vectors.shape == (len(texts), dimension)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    for text, vector in zip(texts, vectors, strict=True):
        assert embedder.embed([text])[0].tobytes() == vector.tobytes()


def test_same_bytes_in_another_process_with_another_hash_seed(passages: list[str]) -> None:
    program = (
        "import hashlib, sys\n"
        "from ttt_adapt.embedding.hashing import HashingEmbedder\n"
        "text = sys.stdin.buffer.read().decode()\n"
        "vectors = HashingEmbedder(384).embed(text.split('\\0'))\n"
        "print(hashlib.sha256(vectors.tobytes()).hexdigest())\n"
    )
    texts = [*passages[:10], "Здравствуй, мир", "機械学習 と 検索"]
    expected = hashlib.sha256(HashingEmbedder(384).embed(texts).tobytes()).hexdigest()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            input="\0".join(texts).encode(),
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert run.stdout.decode().strip() == expected


def test_vectors_stay_what_existing_indexes_hold() -> None:
    """A change here needs another CODE_VERSION."""
    vector = HashingEmbedder(8).embed(["def alpha(beta): return beta + 1"])[0]
    pinned = [-0.484256, 0.309572, -0.484256, 0.103191, 0.484289, -0.268148, -0.039796, 0.341302]
    np.testing.assert_allclose(vector, pinned, atol=1e-5)


@pytest.mark.parametrize("text", ["", "   ", "\n\t \u2003"])
def test_nothing_to_hash_is_the_first_unit_vector(text: str) -> None:
    np.testing.assert_array_equal(HashingEmbedder(16).embed([text])[0], np.eye(16)[0])


def test_whitespace_runs_and_case_do_not_matter() -> None:
    one, other = HashingEmbedder(384).embed(["Def f(X):\n        return X", "def f(x): return x"])
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("query", "near", "far"),
    [
        ("for item in items:\n    total += item", "total = 0\nfor item in rows: pass", "SELECT 1;"),
        ("梯度下降是一种优化算法", "优化算法中的梯度下降", "今天天气很好，我们去公园"),
        ("Der Fluss fließt ins Meer", "Flüsse fließen in das Meer", "quantum chromodynamics"),
    ],
)
def test_related_texts_are_nearer(query: str, near: str, far: str) -> None:
    query_D, near_D, far_D = HashingEmbedder(384).embed([query, near, far])
    assert query_D @ near_D > query_D @ far_D + 0.1


def test_max_tokens_reads_that_many_words() -> None:
    full, cut = HashingEmbedder(64), HashingEmbedder(64, max_tokens=3)
    np.testing.assert_array_equal(cut.embed(["a b, c d"]), full.embed(["a b,"]))
    np.testing.assert_array_equal(cut.embed(["a b"]), full.embed(["a b"]))


def test_a_huge_text_is_read_up_to_the_limit() -> None:
    start = ("word " * (CHARACTER_LIMIT // 5 + 1))[:CHARACTER_LIMIT]
    vectors = HashingEmbedder(32).embed([start, start + " entirely different"])
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_fingerprint_names_its_parameters() -> None:
    prints = {
        HashingEmbedder(64).fingerprint,
        HashingEmbedder(65).fingerprint,
        HashingEmbedder(64, max_tokens=9).fingerprint,
    }
    assert len(prints) == 3
    assert HashingEmbedder(64).fingerprint in prints


def test_settings_and_progress() -> None:
    embedder = load_embedder(EmbeddingSettings(kind="hashing", dimension=48))
    counts: list[int] = []
    assert embedder.embed(["a", "b", "c"], progress=counts.append).shape == (3, 48)
    assert (sum(counts), embedder.dimension) == (3, 48)
    assert embedder.description == "feature hashing, 48 dimensions"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"text 1: lone surrogate U\+D83D at character 2"):
        HashingEmbedder(8).embed(["fine", "ab\ud83d"])
