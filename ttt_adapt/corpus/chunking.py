"""Documents into passages: windows of bytes or tokens that overlap or tile the text exactly."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ttt_adapt.config import ChunkSettings
from ttt_adapt.errors import SettingsError
from ttt_adapt.types import Document, Passage

Offsets = Callable[[str], Sequence[tuple[int, int]]]

BREAK_FRACTION = 0.15
"""A window of bytes may end this share of its size early, for the sake of a natural boundary."""

BREAKS = ((b"\n\n", 2), (b"\n", 1), (b" ", 0))
"""Natural boundaries, the best first, and how many of their bytes end the window: a space begins
the next one, because language models write it with the word that follows."""

SEGMENT_CHARACTERS = 1 << 18
"""Text tokenised at a time: a tokenizer needs some hundred bytes of memory for each token."""

SEGMENT_MARGIN = 32
"""Tokens at a segment's end that may be other ones in the whole text, and are not cut at."""


def chunk_documents(
    documents: Iterable[Document],
    settings: ChunkSettings,
    *,
    offsets: Offsets | None = None,
) -> Iterator[Passage]:
    """Cut documents into passages, in order; ids are ``<document id>#<ordinal>``.

    With ``overlap`` 0 a document's passages concatenate to its text, but for a last one shorter
    than ``min_size``, which is dropped unless it is the only one. No character is ever split; a
    window too small for the character it begins with holds that character. Time is linear in the
    text as long as ``overlap`` is not close to ``size``.

    Bytes: windows of at most ``size`` UTF-8 bytes that end after the last empty line, else after
    the last line end, else before the last space, of their last 15 %, where there is one. The next
    window begins ``overlap`` bytes before that end, or up to 3 fewer where characters need it.

    Tokens: windows of ``size`` tokens, as ``offsets`` cuts the text; characters between tokens go
    with the token before them. Texts beyond some 260,000 characters are tokenised in segments that
    begin where a passage begins.

    Args:
        offsets: needed for ``unit="tokens"``: spans ``(start, end)`` in characters of a text's
            tokens, in order. Empty spans (special tokens) are passed over; tokens that share a
            character (byte-level vocabularies) are kept together.

    Raises:
        SettingsError: ``unit`` is ``tokens`` and ``offsets`` is missing.
    """
    if settings.unit == "bytes":
        return _passages(documents, lambda text: _byte_windows(text, settings))
    if offsets is None:
        raise SettingsError(
            "chunks.unit is 'tokens': expected a tokenizer's offsets, found none; "
            "pass offsets=, or count in bytes"
        )
    return _passages(documents, lambda text: _token_windows(text, settings, offsets))


def _passages(
    documents: Iterable[Document], windows: Callable[[str], Iterator[str]]
) -> Iterator[Passage]:
    for document in documents:
        for ordinal, text in enumerate(windows(document.text)):
            yield Passage(
                id=f"{document.id}#{ordinal}",
                document_id=document.id,
                ordinal=ordinal,
                text=text,
                source=document.source,
                subset=document.subset,
            )


def _byte_windows(text: str, settings: ChunkSettings) -> Iterator[str]:
    data = text.encode("utf-8")
    total = len(data)
    # Below this offset an early end would leave the next window without anything new.
    earliest = max(settings.overlap + 1, int(settings.size * (1.0 - BREAK_FRACTION)))
    start = 0
    while start < total:
        end = start + settings.size
        if end >= total:
            if start == 0 or total - start >= settings.min_size:
                yield data[start:].decode("utf-8")
            return
        end = _break(data, min(start + earliest, end), _character_start(data, start, end))
        yield data[start:end].decode("utf-8")
        start = _next_start(data, start, end, settings)


def _next_start(data: bytes, start: int, end: int, settings: ChunkSettings) -> int:
    """The character that begins the window after ``start:end``; at least one after it is new."""
    new = end + 1
    while new < len(data) and data[new] & 0xC0 == 0x80:
        new += 1
    follow = min(end, max(end - settings.overlap, new - settings.size, start + 1))
    while follow < end and data[follow] & 0xC0 == 0x80:
        follow += 1
    return follow


def _break(data: bytes, earliest: int, end: int) -> int:
    """Where a window that may reach ``end`` ends: at a natural boundary, not before earliest."""
    for mark, taken in BREAKS:
        found = data.rfind(mark, max(0, earliest - taken), end - taken + len(mark))
        if found >= 0:
            return found + taken
    return end


def _character_start(data: bytes, start: int, end: int) -> int:
    """The last character boundary up to ``end``, or the first after ``start`` if that is none."""
    position = end
    while position > start and data[position] & 0xC0 == 0x80:
        position -= 1
    if position > start:
        return position
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return end


def _token_windows(text: str, settings: ChunkSettings, offsets: Offsets) -> Iterator[str]:
    base = 0
    length = SEGMENT_CHARACTERS
    while base < len(text):
        segment = text[base : base + length]
        is_last = base + length >= len(text)
        starts = _unit_starts(offsets(segment))
        num_tokens = len(starts)
        usable = num_tokens if is_last else num_tokens - SEGMENT_MARGIN
        first = 0
        while (end := first + settings.size) < usable:
            cut = _token_cut(starts, first, end)
            if cut >= num_tokens:
                break
            yield segment[_position(starts, first) : starts[cut]]
            first = _follow(starts, first, cut, settings)
        if is_last:
            rest = segment[_position(starts, first) :]
            is_only = base == 0 and first == 0
            if rest and (is_only or num_tokens - first >= settings.min_size):
                yield rest
            return
        # The unfinished window begins the next segment; a segment without a whole one was short.
        advance = _position(starts, first)
        length = SEGMENT_CHARACTERS if advance else 2 * length
        base += advance


def _unit_starts(spans: Sequence[tuple[int, int]]) -> list[int]:
    """First characters of the tokens that hold any; tokens of one character repeat its position."""
    starts: list[int] = []
    reached = 0
    for start, end in spans:
        if end > start:
            starts.append(starts[-1] if starts and start < reached else start)
            reached = max(reached, end)
    return starts


def _position(starts: Sequence[int], index: int) -> int:
    """Where the window that begins with a token begins: the first one takes what lies before."""
    return starts[index] if index else 0


def _token_cut(starts: Sequence[int], first: int, end: int) -> int:
    """A cut at most at token ``end`` that is no middle of a character, and after ``first``."""
    cut = end
    while cut > first and starts[cut - 1] == starts[cut]:
        cut -= 1
    if cut > first and starts[cut] > _position(starts, first):
        return cut
    cut = end
    while cut < len(starts) and (
        starts[cut] == starts[cut - 1] or starts[cut] <= _position(starts, first)
    ):
        cut += 1
    return cut


def _follow(starts: Sequence[int], first: int, cut: int, settings: ChunkSettings) -> int:
    """The token that the next window begins with: a character's first, after ``first``, and such
    that at least one character after the cut is new."""
    new = cut + 1
    while new < len(starts) and starts[new] == starts[cut]:
        new += 1
    follow = min(cut, max(cut - settings.overlap, new - settings.size, first + 1))
    while follow < cut and (
        starts[follow] == starts[follow - 1] or starts[follow] <= _position(starts, first)
    ):
        follow += 1
    return follow
