"""The frozen values that flow between rooms.

    Document → Passage → Embedding → Neighbors → Selection → Prediction → BitsPerByte

Shape legend: N passages, K candidates, M query rows, D embedding width.
Arrays are numpy; they are not copied on the way and must not be written to.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]
Report = Callable[[str], None]
"""Receives one line of progress at a time."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text as its corpus holds it.

    Attributes:
        id: stable across runs: the corpus' own id, or one derived from source and position.
        text: Unicode without lone surrogates, so that it always has a UTF-8 form.
        source: where it came from, for people (``train.jsonl.zst:17``, ``pkg/mod.py``).
        subset: the name evaluation groups by (``meta.pile_set_name`` in the Pile); may be empty.
        meta: further columns, as JSON values.
    """

    id: str
    text: str
    source: str = ""
    subset: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: what is embedded, retrieved and learned from.

    Attributes:
        id: ``<document_id>#<ordinal>``.
        ordinal: position among the document's passages, from 0.
    """

    id: str
    document_id: str
    ordinal: int
    text: str
    source: str = ""
    subset: str = ""


class Embedder(Protocol):
    """Text to unit vectors.

    Attributes:
        fingerprint: SHA-256 over everything the vectors depend on: weights, tokenizer, pooling,
            cut and dtype. Equal fingerprints mean interchangeable vectors.
        dimension: D.
        description: one line for people, e.g. ``all-MiniLM-L6-v2, bfloat16``.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def description(self) -> str: ...

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """Unit vectors ``[len(texts), D]`` in input order; ``progress`` gets counts as they finish.

        The result for a text does not depend, beyond rounding, on the texts beside it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Neighbors:
    """What an index hands out for one query of M rows: the union of its rows' candidates.

    Attributes:
        ids: int64 ``[K]`` positions in the index, distinct, never negative, most similar first.
        scores: float32 ``[K]`` inner product with the query, the largest over its rows.
        vectors: float32 ``[K, D]`` raw (unquantised) unit vectors.
        num_excluded_own: passages of the query's own document left out.
        num_excluded_overlap: passages left out as near-duplicates of the query text.
    """

    ids: IntArray
    scores: NDArray[np.float32]
    vectors: NDArray[np.float32]
    num_excluded_own: int = 0
    num_excluded_overlap: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """What to learn from, in order of picking.

    Attributes:
        indices: int64 ``[n]`` positions among the candidates.
        posterior_var: float64 ``[n]`` Σ over query rows of Var(query row | picks so far, λ), after
            each pick.
        gains: float64 ``[n]`` the fall of that sum at each pick.
        prior_var: the sum before any pick (M for unit query rows).
        method: the selector's name.
        approximate: whether the method promises less than the greedy optimum it is named after.
    """

    indices: IntArray
    posterior_var: NDArray[np.float64]
    gains: NDArray[np.float64]
    prior_var: float
    method: str
    approximate: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Nats and bytes of exactly the text that was scored.

    Attributes:
        nats: −Σ ln p over every scored token, the first included.
        num_bytes: UTF-8 bytes of the scored text.
        num_tokens: tokens scored.
    """

    nats: float
    num_bytes: int
    num_tokens: int

    @property
    def bits_per_byte(self) -> float:
        """nats / (ln 2 · bytes); NaN for an empty text."""
        return self.nats / (math.log(2.0) * self.num_bytes) if self.num_bytes else float("nan")


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """Corpus-level bits per byte: a ratio of sums, not a mean of ratios.

    Attributes:
        total: the sums over all texts.
        per_text: one score a text, in input order.
    """

    total: Score
    per_text: tuple[Score, ...]

    @property
    def value(self) -> float:
        """−Σ ln p / (ln 2 · Σ bytes)."""
        return self.total.bits_per_byte


@dataclass(frozen=True, slots=True)
class Learned:
    """How learning on one query went.

    Attributes:
        losses_nats: mean loss per token of each step's chunk before that step, in order.
        num_tokens: tokens trained on.
        stopped: empty, or why learning ended early (``nan``, ``exploded``); the state before the
            offending step is what predictions were made with.
        elapsed_s: seconds in learning, without scoring.
    """

    losses_nats: tuple[float, ...]
    num_tokens: int
    stopped: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Source:
    """A passage that was learned from, for people."""

    passage_id: str
    source: str
    subset: str
    score: float
    gain: float
    posterior_var: float
    text: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """One query, before and after.

    Attributes:
        query_id: the document's id.
        subset: the document's subset.
        steps: evaluation points asked for, ascending.
        scores: one a step; the first is the base model's when ``steps`` starts with 0.
        num_steps: training steps the query's data allowed; later points repeat the last state.
        learned: how learning went; ``None`` for methods that learn nothing.
        sources: what was learned from, in order of use.
        num_excluded_own: see :class:`Neighbors`.
        num_excluded_overlap: see :class:`Neighbors`.
        seconds: by stage: ``embed``, ``retrieve``, ``select``, ``train``, ``score``.
        failure: empty, or one line why this query has no scores.
    """

    query_id: str
    subset: str
    steps: tuple[int, ...]
    scores: tuple[Score, ...]
    num_steps: int
    learned: Learned | None
    sources: tuple[Source, ...]
    num_excluded_own: int = 0
    num_excluded_overlap: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
