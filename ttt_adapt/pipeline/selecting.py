"""From a query to the passages to learn from: embed, retrieve, leave out what would leak, select."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import ChunkSettings, RetrievalSettings, SelectionSettings, make_settings
from ttt_adapt.corpus import NgramOverlap, chunk_documents
from ttt_adapt.errors import SelectionError
from ttt_adapt.indexes import Index
from ttt_adapt.pipeline.building import open_index, token_offsets
from ttt_adapt.runtime import derived_seed
from ttt_adapt.selection import select as select_candidates
from ttt_adapt.types import Document, Embedder, Neighbors, Passage, Selection, Source


@dataclass(frozen=True, slots=True)
class Query:
    """A text to find passages for.

    Attributes:
        text: what is embedded.
        id: names the query in results and seeds its random choices.
        own_document: id of the document it was taken from, whose passages are left out.
        whole: what near-duplicates are judged against, if more than ``text``: under the protocol
            ``split`` the scored half too, or evaluation would learn copies of it.
    """

    text: str
    id: str = "query"
    own_document: str = ""
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A query's vectors and candidates.

    Attributes:
        rows: float32 ``[M, D]`` unit query vectors.
        neighbors: candidates, most similar first.
        seconds: ``embed`` and ``retrieve``.
    """

    query: Query
    rows: NDArray[np.float32]
    neighbors: Neighbors
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Picked:
    """What to learn from for one query.

    Attributes:
        selection: positions among ``neighbors``, in order of picking.
        neighbors: the candidates selected from.
        passages: the selected passages, in order of picking.
        scores: float32 ``[n]`` their similarities with the query.
        seconds: ``embed``, ``retrieve`` and ``select``.
    """

    query: Query
    selection: Selection
    neighbors: Neighbors
    passages: tuple[Passage, ...]
    scores: NDArray[np.float32]
    seconds: Mapping[str, float]

    def sources(self, order: Sequence[int] | None = None) -> tuple[Source, ...]:
        """The passages for people, in order of picking or in the ``order`` given."""
        positions = range(len(self.passages)) if order is None else order
        return tuple(
            Source(
                passage_id=self.passages[position].id,
                source=self.passages[position].source,
                subset=self.passages[position].subset,
                score=float(self.scores[position]),
                gain=float(self.selection.gains[position]),
                posterior_var=float(self.selection.posterior_var[position]),
                text=self.passages[position].text,
            )
            for position in positions
        )


def select(
    query: str | Query,
    index: Path | tuple[Index, Embedder],
    *,
    selection: SelectionSettings | None = None,
    retrieval: RetrievalSettings | None = None,
    seed: int = 0,
) -> Picked:
    """Choose the passages to learn from for one query.

    Args:
        query: a text, or a text with an id and the document it came from.
        index: a folder, or what :func:`ttt_adapt.pipeline.open_index` gave for it.
        selection: the selector and its settings.
        retrieval: how many candidates, and what may not be among them.
        seed: of the random selector.
    """
    opened = open_index(index) if isinstance(index, Path) else index
    asked = query if isinstance(query, Query) else Query(query)
    chosen = selection or SelectionSettings()
    limits = retrieval or RetrievalSettings()
    (found,) = retrieve([asked], *opened, limits)
    return pick(found, opened[0], chosen, limits, seed)


def retrieve(
    queries: Sequence[Query], index: Index, embedder: Embedder, settings: RetrievalSettings
) -> list[Retrieved]:
    """Embed queries together and find each one's candidates; seconds are shared out evenly."""
    for query in queries:
        if not query.text.strip():
            raise SelectionError(f"{query.id}: expected a query with text, found an empty one")
    started = time.perf_counter()
    texts_of = [_row_texts(query, index, settings) for query in queries]
    flat = [text for texts in texts_of for text in texts]
    vectors = embedder.embed(flat)
    embed_s = (time.perf_counter() - started) / max(1, len(queries))
    found = []
    start = 0
    for query, texts in zip(queries, texts_of, strict=True):
        rows = vectors[start : start + len(texts)]
        start += len(texts)
        begun = time.perf_counter()
        neighbors = index.search(
            rows,
            num_candidates=settings.num_candidates,
            reject=reject_rule(query, settings),
        )
        seconds = {"embed": embed_s, "retrieve": time.perf_counter() - begun}
        found.append(Retrieved(query, rows, neighbors, seconds))
    return found


def pick(
    found: Retrieved,
    index: Index,
    selection: SelectionSettings,
    retrieval: RetrievalSettings,
    seed: int,
) -> Picked:
    """Run a selector over a query's candidates; ``random`` draws from the whole index instead."""
    begun = time.perf_counter()
    query_seed = derived_seed(seed, found.query.id)
    neighbors = found.neighbors
    if selection.method == "random":
        rule = reject_rule(found.query, retrieval)
        neighbors = index.sample(selection.num_select, query_seed, reject=rule)
    if not len(neighbors.ids):
        raise SelectionError(
            f"{found.query.id}: no candidate is left after leaving out "
            f"{neighbors.num_excluded_own} passages of its own document and "
            f"{neighbors.num_excluded_overlap} near-duplicates; raise max_overlap or add text"
        )
    chosen = select_candidates(neighbors.vectors, found.rows, selection, seed=query_seed)
    scores = (neighbors.vectors[chosen.indices] @ found.rows.T).max(axis=1)
    seconds = {**found.seconds, "select": time.perf_counter() - begun}
    passages = tuple(index.passages(neighbors.ids[chosen.indices]))
    return Picked(found.query, chosen, neighbors, passages, scores, seconds)


def reject_rule(query: Query, settings: RetrievalSettings) -> Callable[[Passage], str] | None:
    """Why a passage may not be learned from: ``own``, ``overlap``, or ``""`` when it may."""
    judged = query.whole or query.text
    overlap = NgramOverlap(judged, settings.ngram_size) if settings.max_overlap < 1.0 else None
    own = query.own_document if settings.exclude_own_document else ""
    if overlap is None and not own:
        return None

    def reject(passage: Passage) -> str:
        if own and passage.document_id == own:
            return "own"
        if overlap is not None and overlap.fraction(passage.text) > settings.max_overlap:
            return "overlap"
        return ""

    return reject


def _row_texts(query: Query, index: Index, settings: RetrievalSettings) -> list[str]:
    if settings.query_rows == "whole":
        return [query.text]
    values: dict[str, Any] = dict(index.info.origin["chunks"])
    chunks = make_settings(ChunkSettings, values, where="the index's origin")
    document = Document(id=query.id, text=query.text)
    passages = chunk_documents([document], chunks, offsets=token_offsets(chunks))
    return [passage.text for passage in passages]
