"""Signed feature hashing of word and character n-grams: vectors without weights.

Every n-gram is hashed to 64 bits; some bits choose one of D dimensions, one bit the sign, so that
collisions cancel in expectation and inner products estimate those of the n-gram counts (Weinberger
et al. 2009, "Feature Hashing for Large Scale Multitask Learning"). Term frequencies are damped as
1 + ln(tf), and each family of n-grams counts the same whatever the text's length.

All arithmetic is on unsigned 64-bit integers in numpy, so vectors are equal on every machine and
in every process. Shape legend: C characters of a text, F features, D dimensions.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.embedding.inputs import check_texts, unit_rows
from ttt_adapt.storage import stable_hash

CODE_VERSION = "hashing-1"
"""Changes whenever the same text would get another vector."""

CHARACTER_LIMIT = 2**20
"""Characters read of a text at most, so that one huge text needs bounded memory."""

WORD_NGRAMS = (1, 2)
CHARACTER_NGRAMS = (3, 4, 5)
WORD_WEIGHT = 0.25
"""Of the words' unit vector beside the characters': more finds fewer passages of the same file."""

Hashes = NDArray[np.uint64]

_WORD = re.compile(r"\w+|[^\w\s]")
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_MASK = 2**64 - 1
_BASE_INVERSE = pow(_BASE, -1, 2**64)


class HashingEmbedder:
    """The weight-free :class:`ttt_adapt.types.Embedder`.

    An empty or whitespace-only text has no n-grams; its vector is the first unit vector.
    """

    def __init__(self, dimension: int = 384, *, max_tokens: int | None = None) -> None:
        """
        Args:
            dimension: D.
            max_tokens: words (or single punctuation marks) read of a text; ``None``: all of its
                first :data:`CHARACTER_LIMIT` characters.
        """
        self._dimension = dimension
        self._max_tokens = max_tokens
        self._fingerprint = stable_hash(
            {
                "kind": "hashing",
                "code": CODE_VERSION,
                "dimension": dimension,
                "max_tokens": max_tokens,
                "words": WORD_NGRAMS,
                "characters": CHARACTER_NGRAMS,
                "word_weight": WORD_WEIGHT,
                "limit": CHARACTER_LIMIT,
                # Lower case and word boundaries follow Python's Unicode tables.
                "unicode": unicodedata.unidata_version,
            }
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the parameters that vectors depend on."""
        return self._fingerprint

    @property
    def dimension(self) -> int:
        """D."""
        return self._dimension

    @property
    def description(self) -> str:
        """One line for people."""
        return f"feature hashing, {self._dimension} dimensions"

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """Unit vectors float32 ``[len(texts), D]``; ``progress`` gets 1 after each text.

        Raises:
            CorpusError: see :func:`ttt_adapt.embedding.inputs.check_texts`.
        """
        check_texts(texts)
        vectors_ND = np.empty((len(texts), self._dimension), dtype=np.float32)
        for position, text in enumerate(texts):
            vectors_ND[position] = unit_rows(self._features(text)[None, :], [position])[0]
            if progress is not None:
                progress(1)
        return vectors_ND

    def _features(self, text: str) -> NDArray[np.float64]:
        total_D = np.zeros(self._dimension)
        for weight, hashes_F in feature_families(text, self._max_tokens):
            features, counts = np.unique(hashes_F, return_counts=True)
            signs = 1.0 - 2.0 * (features & np.uint64(1)).astype(np.float64)
            buckets = ((features >> np.uint64(32)) % np.uint64(self._dimension)).astype(np.int64)
            family_D = np.bincount(
                buckets, weights=signs * (1.0 + np.log(counts)), minlength=self._dimension
            )
            norm = float(np.linalg.norm(family_D))
            if norm > 0:
                total_D += weight * family_D / norm
        # Nothing to hash, or signs that cancelled in a tiny D: a direction nonetheless.
        if not total_D.any():
            total_D[0] = 1.0
        return total_D


def feature_families(text: str, max_tokens: int | None) -> Iterator[tuple[float, Hashes]]:
    """The 64-bit hashes of a text's n-grams, repeats included, one family at a time.

    Yields:
        The family's weight and its hashes, uint64 ``[F]``: first of words, then of characters;
        nothing for a text without either.
    """
    text = text[:CHARACTER_LIMIT].lower()
    spans = [match.span() for match in _WORD.finditer(text)]
    if max_tokens is not None and len(spans) > max_tokens:
        spans = spans[:max_tokens]
        text = text[: spans[-1][1]]
    if not spans:
        return
    words = _word_hashes(text, np.array(spans, dtype=np.int64))
    yield WORD_WEIGHT, np.concatenate([_ngrams(words, size, family=1) for size in WORD_NGRAMS])
    # Runs of whitespace are one space: indentation and line breaks say little about content.
    characters = _mix(_code_points(f" {' '.join(text.split())} "))
    yield 1.0, np.concatenate([_ngrams(characters, size, family=2) for size in CHARACTER_NGRAMS])


def _code_points(text: str) -> Hashes:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.uint64)


def _mix(values: Hashes) -> Hashes:
    """SplitMix64's finaliser: every output bit depends on every input bit (Steele et al. 2014)."""
    values = values + np.uint64(_BASE)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _word_hashes(text: str, spans_W2: NDArray[np.int64]) -> Hashes:
    """One hash a word: its polynomial modulo 2^64, from prefix sums over the whole text.

    With S_i = Σ_{j<i} h_j b^j the word at [start, end) has (S_end − S_start) b^−start, which does
    not depend on where the word stands.
    """
    hashes_C = _mix(_code_points(text))
    sums = np.zeros(len(hashes_C) + 1, dtype=np.uint64)
    np.cumsum(hashes_C * _powers(_BASE, len(hashes_C)), out=sums[1:])
    starts, ends = spans_W2[:, 0], spans_W2[:, 1]
    shifted = (sums[ends] - sums[starts]) * _powers(_BASE_INVERSE, len(hashes_C))[starts]
    return _mix(shifted + (ends - starts).astype(np.uint64))


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _ngrams(units: Hashes, size: int, *, family: int) -> Hashes:
    """Hashes of every run of ``size`` units; runs of other sizes or families hash apart."""
    count = max(len(units) - size + 1, 0)
    hashes = np.full(count, (family * 0x100 + size) * _BASE & _MASK, dtype=np.uint64)
    for offset in range(size):
        hashes = hashes * np.uint64(_BASE) + units[offset : offset + count]
    return _mix(hashes)
