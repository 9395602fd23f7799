"""Plain text: one document a file, or documents ended by separator lines."""

from collections.abc import Iterator
from dataclasses import replace

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import CorpusFile
from ttt_adapt.corpus.problems import Malformed, Problem, explain
from ttt_adapt.corpus.records import Record
from ttt_adapt.corpus.streams import (
    STREAM_ERRORS,
    UTF8_BOM,
    decode_utf8,
    numbered_lines,
    open_stream,
    read_bounded,
    too_long,
)

BINARY_PROBE_BYTES = 8192


def read_whole(
    file: CorpusFile, settings: CorpusSettings, *, skip_binary: bool = False
) -> Record | Problem | None:
    """A file as one document whose id is the file's label.

    Args:
        skip_binary: return ``None`` for a file with a NUL byte among its first 8192 bytes.
    """
    try:
        with open_stream(file.path) as stream:
            head = stream.read(min(BINARY_PROBE_BYTES, settings.max_document_bytes + 1))
            if skip_binary and b"\0" in head:
                return None
            data = read_bounded(stream, settings.max_document_bytes, head)
        text = decode_utf8(data.removeprefix(UTF8_BOM), first_line=1)
    except Malformed as error:
        return Problem(file.label, str(error))
    except STREAM_ERRORS as error:
        return Problem(file.label, f"cannot be read: {explain(error)}")
    return Record(location=file.label, position_id=file.label, text=text)


def read_separated(file: CorpusFile, settings: CorpusSettings) -> Iterator[Record | Problem]:
    """Documents between separator lines, exactly as they stand; ids ``<label>:<ordinal>`` from 1.

    Empty documents have an ordinal too. What follows the last separator is a document unless it
    is nothing at all.
    """
    assert settings.separator is not None
    separator = settings.separator.encode("utf-8")
    ends = (separator + b"\n", separator + b"\r\n", separator)
    # A separator is found even where it is longer than any document may be.
    longest = max(settings.max_document_bytes, len(separator) + 2)
    piece = _Piece(settings.max_document_bytes)
    ordinal, start, number = 1, 1, 0
    try:
        with open_stream(file.path) as stream:
            for number, line in numbered_lines(stream, longest):
                if line in ends:
                    yield _document(piece, file, start, ordinal)
                    piece = _Piece(settings.max_document_bytes)
                    ordinal, start = ordinal + 1, number + 1
                else:
                    piece.add(line)
        if not piece.is_untouched:
            yield _document(piece, file, start, ordinal)
    except STREAM_ERRORS as error:
        yield Problem(f"{file.label}:{number + 1}", f"cannot be read on: {explain(error)}")


class _Piece:
    """The lines of one document as they come in, dropped once they exceed the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self.is_untouched = True

    def add(self, line: bytes | None) -> None:
        self.is_untouched = False
        if line is not None and self._num_bytes <= self._limit:
            self._num_bytes += len(line)
            self._lines.append(line)
        if line is None or self._num_bytes > self._limit:
            self._num_bytes = self._limit + 1
            self._lines.clear()

    def text(self, first_line: int) -> str:
        if self._num_bytes > self._limit:
            raise Malformed(too_long(self._limit))
        data = b"".join(self._lines)
        self._lines.clear()
        return decode_utf8(data, first_line)


def _document(piece: _Piece, file: CorpusFile, start: int, ordinal: int) -> Record | Problem:
    location = f"{file.label}:{start}"
    try:
        record = Record(location=location, position_id=location, text=piece.text(start))
    except Malformed as error:
        return Problem(location, str(error))
    return replace(record, position_id=f"{file.label}:{ordinal}")
