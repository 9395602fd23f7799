"""Protocols: which part of a document is retrieved with, and which part is scored.

``full``: the text that is scored is also the query that finds what to learn from (TTT-NN, SIFT).
``split``: the first half is the query, and is read as context; only the second half is scored. No
scored byte has been seen by retrieval, so this is what a user who continues a text can expect.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from ttt_adapt.config import EvaluationSettings
from ttt_adapt.errors import SettingsError, UserError
from ttt_adapt.runtime import derived_seed
from ttt_adapt.types import Document


@dataclass(frozen=True, slots=True)
class Query:
    """One document under a protocol.

    Attributes:
        id: the document's id.
        subset: the document's subset.
        query: what candidates are retrieved with.
        context: read before ``text``, not scored; empty under ``full``.
        text: what is scored.
        whole: ``context + text``: all that must not be among what is learned from.
    """

    id: str
    subset: str
    query: str
    context: str
    text: str

    @property
    def whole(self) -> str:
        return self.context + self.text


def make_query(document: Document, settings: EvaluationSettings) -> Query:
    """Cut a document to ``max_bytes``, then apply the protocol.

    Raises:
        UserError: the text holds a lone surrogate.
    """
    text = document.text
    if settings.max_bytes is not None:
        text = cut(text, settings.max_bytes)
    if settings.protocol == "full":
        return Query(document.id, document.subset, text, "", text)
    context, continuation = halve(text)
    return Query(document.id, document.subset, context, context, continuation)


def cut(text: str, max_bytes: int) -> str:
    """The longest beginning of ``text`` of at most ``max_bytes`` UTF-8 bytes, cut at a character.

    Raises:
        SettingsError: ``max_bytes`` below 0.
        UserError: the text holds a lone surrogate.
    """
    if max_bytes < 0:
        raise SettingsError(f"max_bytes must not be negative, found {max_bytes}")
    # A character has at least one byte, so no more characters than that can stay.
    data = _encode(text[:max_bytes])
    return data[: _boundary(data, max_bytes)].decode("utf-8")


def halve(text: str) -> tuple[str, str]:
    """Two halves in UTF-8 bytes, cut at the character boundary nearest the middle.

    Of two boundaries equally near, the earlier. Together the halves are the text; a text of one
    character is all second half.

    Raises:
        UserError: the text holds a lone surrogate.
    """
    data = _encode(text)
    middle = len(data) // 2
    earlier = _boundary(data, middle)
    later = middle
    while later < len(data) and data[later] & 0xC0 == 0x80:
        later += 1
    # Doubled, so that the middle of an odd number of bytes is a whole number.
    later_is_nearer = 2 * later - len(data) < len(data) - 2 * earlier
    at = later if later_is_nearer and later < len(data) else earlier
    return data[:at].decode("utf-8"), data[at:].decode("utf-8")


def choose_documents(
    documents: Iterable[Document], *, per_subset: int | None, seed: int
) -> list[Document]:
    """The first ``per_subset`` documents of each subset in a seeded shuffle; ``None``: all.

    The shuffle sorts by a hash of seed, subset and document id. So the choice does not depend on
    the order of ``documents``, a larger ``per_subset`` contains a smaller one's choice, and of
    the documents no more are held than are chosen. The result takes one document of each subset
    in turn: any beginning of it covers the subsets evenly.

    Raises:
        UserError: two documents have the same id.
        SettingsError: ``per_subset`` below 1.
    """
    if per_subset is not None and per_subset < 1:
        raise SettingsError(f"per_subset must be at least 1, found {per_subset}")
    chosen: dict[str, list[tuple[int, str, Document]]] = {}
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise UserError(
                f"two documents have the id {document.id!r}; ids must be unique to be resumed"
            )
        seen.add(document.id)
        rank = derived_seed(seed, document.subset, document.id)
        heap = chosen.setdefault(document.subset, [])
        # Negated ranks make heapq's smallest the one to drop.
        entry = (-rank, document.id, document)
        if per_subset is None or len(heap) < per_subset:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)
    ordered = [
        (turn, subset, document)
        for subset, heap in chosen.items()
        for turn, (_, _, document) in enumerate(sorted(heap, key=lambda entry: -entry[0]))
    ]
    return [document for _, _, document in sorted(ordered, key=lambda item: item[:2])]


def _boundary(data: bytes, position: int) -> int:
    """The last character boundary at or before ``position``."""
    if position >= len(data):
        return len(data)
    while position > 0 and data[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start} has no "
            "UTF-8 form; replace or remove it"
        ) from None
