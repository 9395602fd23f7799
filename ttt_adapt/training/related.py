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
"""Of each passage; where all of them are taken, the path begins anew elsewhere."""


@dataclass(frozen=True)
class RelatedTexts:
    """A source's passages on their path.

    Attributes:
        texts: every passage once.
        num_paths: stretches of passages each of which is a neighbour of the one before it.
    """

    texts: tuple[str, ...]
    num_paths: int


def related_texts(documents: Sequence[Document], seed: int) -> RelatedTexts:
    """Cut documents into passages as an index does, and order them.

    Resemblance is the cosine of hashed n-grams, for it needs no model and is the same everywhere. All
    pairs are compared: N² D multiplications.

    Args:
        documents: with ids that tell them apart.
        seed: decides where the path begins, and where it begins anew.
    """
    passages = list(chunk_documents(documents, ChunkSettings()))
    if not passages:
        return RelatedTexts((), 0)
    vectors_ND = HashingEmbedder().embed([passage.text for passage in passages])
    _, owners_N = np.unique([passage.document_id for passage in passages], return_inverse=True)
    order_N, num_paths = related_order(vectors_ND, owners_N, seed)
    return RelatedTexts(tuple(passages[position].text for position in order_N), num_paths)


def related_order(
    vectors_ND: NDArray[np.float32], owners_N: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], int]:
    """A path through all vectors: on to the most similar neighbour that is left.

    Args:
        vectors_ND: unit vectors.
        owners_N: a number for each vector; no step goes to a vector of the same number.
        seed: of the vectors at which a path begins where no neighbour is left.

    Returns:
        A permutation int64 ``[N]``, and the number of paths it consists of.
    """
    import faiss

    num_passages, width = vectors_ND.shape
    flat = faiss.IndexFlatIP(width)
    flat.add(vectors_ND)
    _, neighbors_NK = flat.search(vectors_ND, min(NUM_NEIGHBORS + 1, num_passages))
    begins = iter(np.random.default_rng(seed).permutation(num_passages))
    is_left = np.ones(num_passages, bool)
    order_N = np.empty(num_passages, np.int64)
    num_paths, current = 0, -1
    for position in range(num_passages):
        near_K = neighbors_NK[current] if current >= 0 else neighbors_NK[0, :0]
        free = near_K[is_left[near_K] & (owners_N[near_K] != owners_N[current])]
        if len(free):
            current = int(free[0])
        else:
            current = int(next(begin for begin in begins if is_left[begin]))
            num_paths += 1
        order_N[position], is_left[current] = current, False
    return order_N, num_paths
