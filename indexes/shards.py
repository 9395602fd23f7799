"""Shards: passages to vectors and Arrow files, a piece at a time, resumable at each piece."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ttt_adapt.errors import CorpusError, FingerprintMismatchError, IndexFormatError
from ttt_adapt.indexes.layout import (
    SHARDS,
    VECTOR_ITEM_BYTES,
    VECTORS,
    arrow_name,
    record_name,
)
from ttt_adapt.storage import atomic_write, sha256_bytes, sha256_file, stable_hash, write_json
from ttt_adapt.types import Embedder, FloatArray, Passage

# A shard also ends when its text reaches this, so that memory is bounded for passages of any size.
SHARD_TEXT_BYTES = 256 * 2**20
# Rows per Arrow record batch; fixed, so that a row's batch follows from its number.
BATCH_ROWS = 256
NORM_TOLERANCE = 1e-2
_HASH_BLOCK = 2**22

SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("document_id", pa.large_string()),
        ("ordinal", pa.int64()),
        ("text", pa.large_string()),
        ("source", pa.large_string()),
        ("subset", pa.large_string()),
    ]
)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What a finished shard holds, as its ``.json`` says.

    Attributes:
        num_passages: rows.
        passages_sha256: of ids, texts and all other fields, in order.
        first_id: of its first passage, for messages.
        vectors_offset: byte at which its rows begin in ``vectors.bin``.
        vectors_sha256: of those bytes.
        arrow_bytes: size of the ``.arrow`` file.
        arrow_sha256: of that file.
    """

    num_passages: int
    passages_sha256: str
    first_id: str
    vectors_offset: int
    vectors_sha256: str
    arrow_bytes: int
    arrow_sha256: str


def cut_shards(passages: Iterable[Passage], shard_passages: int) -> Iterator[list[Passage]]:
    """Runs of at most ``shard_passages`` passages and about :data:`SHARD_TEXT_BYTES` of text."""
    shard: list[Passage] = []
    num_characters = 0
    for passage in passages:
        shard.append(passage)
        num_characters += len(passage.text)
        if len(shard) == shard_passages or num_characters >= SHARD_TEXT_BYTES:
            yield shard
            shard, num_characters = [], 0
    if shard:
        yield shard


def passages_sha256(passages: Sequence[Passage]) -> str:
    """SHA-256 over every field of every passage, unambiguous about where each ends.

    Raises:
        CorpusError: a field has no UTF-8 form.
    """
    digest = hashlib.sha256()
    for p in passages:
        row = (p.id, p.document_id, p.ordinal, p.text, p.source, p.subset)
        try:
            digest.update(json.dumps(row, ensure_ascii=False).encode())
        except UnicodeEncodeError:
            raise CorpusError(
                f"passage {p.id!r}: holds a lone surrogate, which has no UTF-8 form; "
                "decode the corpus with errors='replace'"
            ) from None
        digest.update(b"\n")
    return digest.hexdigest()


def embed_passages(
    passages: Sequence[Passage],
    embedder: Embedder,
    *,
    on_advance: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """The passages' vectors, float32 ``[n, D]``, checked.

    Raises:
        IndexFormatError: not one finite unit vector of the embedder's dimension for each passage.
    """
    texts = [passage.text for passage in passages]
    vectors_ND = np.ascontiguousarray(embedder.embed(texts, progress=on_advance), dtype=np.float32)
    if vectors_ND.ndim != 2 or vectors_ND.shape[0] != len(passages):
        raise IndexFormatError(
            f"the embedder ({embedder.description}) returned an array of shape "
            f"{vectors_ND.shape} for {len(passages)} passages; expected one row for each"
        )
    if vectors_ND.shape[1] != embedder.dimension:
        raise IndexFormatError(
            f"the embedder ({embedder.description}) returned vectors of dimension "
            f"{vectors_ND.shape[1]}, but says its dimension is {embedder.dimension}"
        )
    finite = np.isfinite(vectors_ND).all(axis=1)
    if not finite.all():
        passage = passages[int(np.argmin(finite))]
        raise IndexFormatError(
            f"the embedder ({embedder.description}) gave NaN or infinity for passage "
            f"{passage.id!r} ({passage.source or 'no source'}); look at its text or leave it out"
        )
    norms = np.linalg.norm(vectors_ND, axis=1)
    unit = np.abs(norms - 1.0) <= NORM_TOLERANCE
    if not unit.all():
        row = int(np.argmin(unit))
        raise IndexFormatError(
            f"the embedder ({embedder.description}) gave a vector of norm {norms[row]:.4g} for "
            f"passage {passages[row].id!r}; an index needs unit vectors"
        )
    return vectors_ND


def write_shard(
    folder: Path,
    shard: int,
    first_row: int,
    passages: Sequence[Passage],
    digest: str,
    vectors_ND: FloatArray,
) -> None:
    """Store one shard: vectors at their place, then passages, then the record that makes it count.

    Vectors are flushed to disk before the record exists, so a record never promises rows that a
    power cut can take away.

    Args:
        digest: :func:`passages_sha256` of the passages.
    """
    data = np.ascontiguousarray(vectors_ND, dtype="<f4")
    offset = first_row * data.shape[1] * VECTOR_ITEM_BYTES
    (folder / SHARDS).mkdir(exist_ok=True)
    (folder / record_name(shard)).unlink(missing_ok=True)
    with (folder / VECTORS).open("r+b" if (folder / VECTORS).exists() else "w+b") as stream:
        stream.seek(offset)
        stream.write(data.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    arrow = folder / arrow_name(shard)
    with atomic_write(arrow) as sink:
        _write_arrow(sink, passages)
    record = ShardRecord(
        num_passages=len(passages),
        passages_sha256=digest,
        first_id=passages[0].id,
        vectors_offset=offset,
        vectors_sha256=sha256_bytes(data.tobytes()),
        arrow_bytes=arrow.stat().st_size,
        arrow_sha256=sha256_file(arrow),
    )
    value = asdict(record)
    write_json(folder / record_name(shard), {**value, "checksum": stable_hash(value)})


def read_record(folder: Path, shard: int) -> ShardRecord | None:
    """The record of a shard; ``None`` where there is none, or not the one that was written."""
    try:
        value = json.loads((folder / record_name(shard)).read_text(encoding="utf-8"))
        checksum = value.pop("checksum")
        return ShardRecord(**value) if checksum == stable_hash(value) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def reusable(
    folder: Path,
    shard: int,
    first_row: int,
    dimension: int,
    passages: Sequence[Passage],
    digest: str,
    *,
    strict: bool,
) -> ShardRecord | None:
    """The record of a shard that an earlier attempt finished with these passages, if it is sound.

    A shard whose files are damaged is not reusable; it will be embedded again.

    Args:
        digest: :func:`passages_sha256` of the passages.

    Raises:
        FingerprintMismatchError: ``strict``, and the finished shard holds other passages.
    """
    record = read_record(folder, shard)
    if record is None:
        return None
    if record.passages_sha256 != digest:
        if not strict:
            return None
        raise FingerprintMismatchError(
            f"{folder}: the corpus is not the one this index was begun with: shard {shard} holds "
            f"{record.num_passages} passages from {record.first_id!r} on, the corpus now gives "
            f"{len(passages)} other ones from {passages[0].id!r} on; "
            "restore the corpus, or remove the folder to build anew"
        )
    return None if shard_problems(folder, shard, record, first_row, dimension) else record


def shard_problems(
    folder: Path, shard: int, record: ShardRecord, first_row: int, dimension: int
) -> list[str]:
    """Where a shard's files differ from its record, hashes included."""
    problems = []
    arrow = folder / arrow_name(shard)
    if not arrow.is_file():
        problems.append(f"{arrow_name(shard)}: missing")
    elif arrow.stat().st_size != record.arrow_bytes or sha256_file(arrow) != record.arrow_sha256:
        problems.append(f"{arrow_name(shard)}: differs from its record")
    row_bytes = dimension * VECTOR_ITEM_BYTES
    vectors = folder / VECTORS
    if record.vectors_offset != first_row * row_bytes:
        problems.append(f"{record_name(shard)}: its vectors do not begin at row {first_row}")
    elif not vectors.is_file():
        problems.append(f"{VECTORS}: missing")
    else:
        num_bytes = record.num_passages * row_bytes
        found = hash_range(vectors, record.vectors_offset, num_bytes)
        if found != record.vectors_sha256:
            problems.append(
                f"{VECTORS}: rows {first_row} to {first_row + record.num_passages - 1} "
                f"(shard {shard}) differ from its record"
            )
    return problems


def hash_range(path: Path, offset: int, num_bytes: int) -> str:
    """SHA-256 of ``num_bytes`` bytes from ``offset`` on (of fewer where the file is shorter)."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(offset)
        while num_bytes > 0 and (block := stream.read(min(num_bytes, _HASH_BLOCK))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()


def _write_arrow(sink: IO[bytes], passages: Sequence[Passage]) -> None:
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for start in range(0, len(passages), BATCH_ROWS):
            rows = passages[start : start + BATCH_ROWS]
            columns = [[getattr(row, name) for row in rows] for name in SCHEMA.names]
            arrays = [pa.array(c, type=f.type) for c, f in zip(columns, SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
