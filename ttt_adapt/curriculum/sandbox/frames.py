"""Messages over a Unix socket: four bytes of length, then JSON; file descriptors ride along.

Standard library only: untrusted programs run in processes that hold no more than that.
"""

import json
import socket
import struct
from typing import Any

MAX_BYTES = 64 * 2**20
"""Of one message: what the launcher and its caller accept from each other."""

_HEADER = struct.Struct(">I")


class BadFrame(ValueError):
    """What came is no message: cut short, too long, or no JSON."""


def send(channel: socket.socket, value: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Write one message; ``descriptors`` are duplicated into the receiving process."""
    body = json.dumps(value).encode("ascii")
    if len(body) > MAX_BYTES:
        raise BadFrame(f"a message of {len(body):,} bytes, at most {MAX_BYTES:,}")
    header = _HEADER.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], descriptors)
    else:
        channel.sendall(header)
    channel.sendall(body)


def receive(channel: socket.socket, max_bytes: int = MAX_BYTES) -> Any:
    """The next message, or ``None`` when the other side has closed.

    Raises:
        BadFrame: what comes is no message of at most ``max_bytes``.
    """
    return receive_with_descriptors(channel, 0, max_bytes)[0]


def receive_with_descriptors(
    channel: socket.socket, max_descriptors: int, max_bytes: int = MAX_BYTES
) -> tuple[Any, list[int]]:
    """As :func:`receive`, with the file descriptors that came along (the caller closes them)."""
    descriptors: list[int] = []
    if max_descriptors:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, max_descriptors)
    else:
        header = channel.recv(_HEADER.size)
    if not header:
        return None, descriptors
    header += _exactly(channel, _HEADER.size - len(header))
    (length,) = _HEADER.unpack(header)
    if length > max_bytes:
        raise BadFrame(f"a message of {length:,} bytes, at most {max_bytes:,}")
    try:
        return json.loads(_exactly(channel, length)), descriptors
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"no JSON: {error}") from None


def _exactly(channel: socket.socket, count: int) -> bytes:
    pieces = []
    while count:
        piece = channel.recv(min(count, 2**20))
        if not piece:
            raise BadFrame("the message is cut short")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
