"""Passages in an order in which each resembles the one before it, whatever document it is from.

A model that is to read retrieved passages learns little of that from windows of unrelated texts: at
the beginning of a text, forgetting is best. In windows of related texts what was read pays (Shi et al.
2023, "In-Context Pretraining", arXiv 2310.10638, section 2; there whole documents, here the passages
that an index would hold).

Shape legend: N passages, K neighbours, D dimensions of a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import ChunkSettings
from ttt_adapt.corpus import chunk_documents
from ttt_adapt.embedding.hashing import HashingEmbedder
from ttt_adapt.types import Document

NUM_NEIGHBORS = 64
"""Looked up for all passages at once; where all of one's are taken, whatever is left is looked at."""


@dataclass(frozen=True)
class RelatedTexts:
    """A source's passages on their path.

    Attributes:
        texts: every passage once.
        mean_cosine: of a passage and the one after it; 0 with fewer than two.
    """

    texts: tuple[str, ...]
    mean_cosine: float


def related_texts(documents: Sequence[Document], seed: int) -> RelatedTexts:
    """Cut documents into passages as an index does, and order them.

    Resemblance is the cosine of hashed n-grams, for it needs no model and is the same everywhere. All
    pairs are compared: N² D multiplications.

    Args:
        documents: with ids that tell them apart.
        seed: decides where the path begins.
    """
    passages = list(chunk_documents(documents, ChunkSettings()))
    if not passages:
        return RelatedTexts((), 0.0)
    vectors_ND = HashingEmbedder().embed([passage.text for passage in passages])
    _, owners_N = np.unique([passage.document_id for passage in passages], return_inverse=True)
    order_N = related_order(vectors_ND, owners_N, seed)
    along = np.einsum("nd,nd->n", vectors_ND[order_N[:-1]], vectors_ND[order_N[1:]])
    mean_cosine = float(along.mean()) if len(along) else 0.0
    return RelatedTexts(tuple(passages[position].text for position in order_N), mean_cosine)


def related_order(
    vectors_ND: NDArray[np.float32], owners_N: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """A greedy path through all vectors: always on to the most similar one that is left.

    Args:
        vectors_ND: unit vectors.
        owners_N: a number for each vector; no step goes to a vector of the same number, unless only
            such are left.
        seed: of the vector at which the path begins.

    Returns:
        A permutation int64 ``[N]``.
    """
    import faiss

    num_passages, width = vectors_ND.shape
    flat = faiss.IndexFlatIP(width)
    flat.add(vectors_ND)
    _, neighbors_NK = flat.search(vectors_ND, min(NUM_NEIGHBORS + 1, num_passages))
    is_left = np.ones(num_passages, bool)
    order_N = np.empty(num_passages, np.int64)
    current = int(np.random.default_rng(seed).integers(num_passages))
    for position in range(num_passages):
        order_N[position], is_left[current] = current, False
        near_K = neighbors_NK[current]
        free_K = near_K[is_left[near_K] & (owners_N[near_K] != owners_N[current])]
        if len(free_K):
            current = int(free_K[0])
        elif position + 1 < num_passages:
            current = _most_similar(vectors_ND, owners_N, np.flatnonzero(is_left), current)
    return order_N


def _most_similar(
    vectors_ND: NDArray[np.float32],
    owners_N: NDArray[np.int64],
    left_L: NDArray[np.int64],
    current: int,
) -> int:
    others_L = left_L[owners_N[left_L] != owners_N[current]]
    candidates_L = others_L if len(others_L) else left_L
    return int(candidates_L[np.argmax(vectors_ND[candidates_L] @ vectors_ND[current])])
