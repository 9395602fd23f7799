"""Bytes out of plain, gzip and zstd files, in bounded memory whatever the file holds."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ttt_adapt.corpus.problems import Malformed

COMPRESSED_SUFFIXES = (".zst", ".gz")
STREAM_ERRORS = (OSError, EOFError, zlib.error)
"""What opening and reading a stream of :func:`open_stream` can raise."""

BUFFER_BYTES = 1 << 17
PIECE_BYTES = 1 << 20
UTF8_BOM = b"\xef\xbb\xbf"


def open_stream(path: Path) -> BinaryIO:
    """Open a file for reading its decompressed bytes; ``.zst`` and ``.gz`` by suffix.

    Concatenated frames and members are read as one stream. A truncated or damaged stream raises
    one of :data:`STREAM_ERRORS` where it breaks.
    """
    if path.suffix == ".gz":
        return cast(BinaryIO, io.BufferedReader(_gzip(path), BUFFER_BYTES))
    if path.suffix == ".zst":
        # Not the zstandard package: its stream reader takes a truncated file for a whole one.
        import pyarrow

        compressed = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(compressed, BUFFER_BYTES)
    return path.open("rb", buffering=BUFFER_BYTES)


def numbered_lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines from 1, each with its line end; ``None`` for one of more than ``limit`` bytes.

    An over-long line is read past in small pieces, never held. A UTF-8 byte order mark at the
    stream's beginning is dropped.
    """
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(UTF8_BOM)
        if len(line) <= limit or line.endswith(b"\n"):
            yield number, line
            continue
        del line
        while (rest := stream.readline(PIECE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield number, None


def read_bounded(stream: BinaryIO, limit: int, head: bytes = b"") -> bytes:
    """``head``, which was read already, and the rest of a stream.

    Raises:
        Malformed: together they exceed ``limit`` bytes; reading stops there.
    """
    pieces = [head]
    size = len(head)
    while size <= limit and (piece := stream.read(min(PIECE_BYTES, limit + 1 - size))):
        size += len(piece)
        pieces.append(piece)
    if size > limit:
        raise Malformed(too_long(limit))
    return b"".join(pieces)


def decode_utf8(data: bytes, first_line: int | None = None) -> str:
    """Text of UTF-8 bytes.

    Args:
        first_line: number of the line that ``data`` begins with, for the message.

    Raises:
        Malformed: it is no UTF-8; the message names the first offending byte and where it is.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}"
        if first_line is not None:
            line = first_line + data.count(b"\n", 0, error.start)
            where += f", line {line}"
        raise Malformed(
            f"invalid UTF-8 at {where}: 0x{data[error.start]:02x}, {error.reason}"
        ) from None


def too_long(limit: int) -> str:
    """The reason for refusing a document that exceeds the limit."""
    return f"longer than max_document_bytes ({limit:,} bytes)"


def _gzip(path: Path) -> io.RawIOBase:
    # BufferedReader needs readinto() and no more, which GzipFile has; its stubs ask for RawIOBase.
    return cast(io.RawIOBase, gzip.open(path, "rb"))
