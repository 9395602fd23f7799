"""Seeded words in place of a corpus, and an embedder of them."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.types import Passage

WORDS = ("alpha", "beta", "kernel", "matrix", "vector", "query", "river", "mountain", "garden",
         "winter", "def", "return", "import", "class", "for", "while", "print", "value", "number",
         "string", "table", "window", "engine")  # fmt: skip


def sample_text(seed: int, num_words: int = 60) -> str:
    """Words in a seeded order: different seeds share a vocabulary, not sentences."""
    import random

    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


class HashedWords:
    """A weight-free :class:`ttt_adapt.types.Embedder`: a seeded random direction for each word.

    Needs numpy only and gives the same bytes in every process, whatever the batch.
    """

    def __init__(self, dimension: int = 32) -> None:
        self.dimension = dimension
        self.fingerprint = f"{dimension:064x}"
        self.description = f"hashed words, {dimension} dimensions"
        self._directions: dict[str, NDArray[np.float32]] = {}

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row] += self._direction(word)
            vectors[row] += 1e-3 * self._direction(text)
            vectors[row] /= np.linalg.norm(vectors[row])
            if progress is not None:
                progress(1)
        return vectors

    def _direction(self, word: str) -> NDArray[np.float32]:
        direction = self._directions.get(word)
        if direction is None:
            generator = np.random.default_rng(list(word.encode("utf-8", "surrogatepass")))
            direction = generator.standard_normal(self.dimension).astype(np.float32)
            if len(word) < 24:
                self._directions[word] = direction
        return direction


def sample_passages(num_documents: int, *, first: int = 0) -> Iterator[Passage]:
    """Three passages of twelve words for each of ``num_documents`` documents from ``first`` on."""
    for document in range(first, first + num_documents):
        for ordinal in range(3):
            yield Passage(
                id=f"document-{document}#{ordinal}",
                document_id=f"document-{document}",
                ordinal=ordinal,
                text=sample_text(3 * document + ordinal, 12),
                source=f"words.txt:{document}",
                subset=f"subset-{document % 2}",
            )
