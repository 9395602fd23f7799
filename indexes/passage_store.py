"""Passages and raw vectors of an index, memory-mapped: any row without reading the others."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ttt_adapt.errors import IndexFormatError
from ttt_adapt.indexes.layout import VECTORS, Manifest, arrow_name
from ttt_adapt.indexes.shards import BATCH_ROWS, SCHEMA
from ttt_adapt.types import IntArray, Passage


class PassageStore:
    """Rows of an index by number, from 0; shards are mapped when first needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._num_passages = manifest.num_passages
        self._starts = np.concatenate([[0], np.cumsum(manifest.shard_rows, dtype=np.int64)])
        self._rows = manifest.shard_rows
        self._shards: dict[int, list[list[Any]]] = {}
        self.vectors_ND: NDArray[np.float32] = np.memmap(
            folder / VECTORS,
            dtype="<f4",
            mode="r",
            shape=(manifest.num_passages, manifest.dimension),
        )

    def passages(self, ids: Sequence[int] | IntArray) -> list[Passage]:
        """The passages of these rows, in this order; each must be in ``[0, N)``."""
        found = []
        rows = np.asarray(ids, dtype=np.int64)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        for row, shard in zip(rows.tolist(), shards.tolist(), strict=True):
            batch, at = divmod(row - int(self._starts[shard]), BATCH_ROWS)
            columns = self._batches(shard)[batch]
            found.append(Passage(*(column[at] for column in columns)))
        return found

    def column(self, shard: int, name: str) -> list[str]:
        """One column of one shard."""
        position = SCHEMA.names.index(name)
        return [
            columns[position][at]
            for columns in self._batches(shard)
            for at in range(len(columns[position]))
        ]

    def dataset(self) -> Any:
        """All passages as one memory-mapped ``datasets.Dataset``."""
        import datasets

        files = [str(self._folder / arrow_name(shard)) for shard in range(len(self._rows))]
        parts = [datasets.Dataset.from_file(name) for name in files]
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

    def _batches(self, shard: int) -> list[list[Any]]:
        batches = self._shards.get(shard)
        if batches is None:
            batches = self._shards[shard] = read_batches(
                self._folder / arrow_name(shard), self._rows[shard]
            )
        return batches


class _Strings:
    """A column of strings, each checked as it is read.

    Arrow trusts the offsets in a file; reading through damaged ones takes the process down. Having
    Arrow validate them costs a pass over the whole shard, where this costs one comparison a row.
    """

    def __init__(self, path: Path, array: Any) -> None:
        _, offsets, data = array.buffers()
        self._path = path
        self._offsets = np.frombuffer(offsets, dtype="<i8")[: len(array) + 1]
        self._data = memoryview(data) if data is not None else memoryview(b"")
        if array.offset or len(self._offsets) != len(array) + 1:
            raise IndexFormatError(f"{path}: damaged; verify the index, or build it anew")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, at: int) -> str:
        start, stop = int(self._offsets[at]), int(self._offsets[at + 1])
        if 0 <= start <= stop <= len(self._data):
            with contextlib.suppress(UnicodeDecodeError):
                return str(self._data[start:stop], "utf-8")
        raise IndexFormatError(f"{self._path}: damaged; verify the index, or build it anew")


def read_batches(path: Path, num_rows: int) -> list[list[Any]]:
    """The columns of each record batch in a shard's Arrow stream, memory-mapped.

    Raises:
        IndexFormatError: not an Arrow stream of the expected columns and number of rows.
    """
    try:
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            schema = reader.schema
            batches = list(reader) if schema.equals(SCHEMA) else []
        columns = [
            [
                _Strings(path, array)
                if pa.types.is_large_string(array.type)
                else np.frombuffer(array.buffers()[1], dtype="<i8")[: len(array)].tolist()
                for array in batch.columns
            ]
            for batch in batches
        ]
    except (OSError, pa.ArrowException, TypeError, ValueError) as error:
        if isinstance(error, IndexFormatError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise IndexFormatError(f"{path}: cannot be read as an Arrow stream: {reason}") from None
    if not schema.equals(SCHEMA):
        raise IndexFormatError(f"{path}: expected columns {SCHEMA.names}, found {schema.names}")
    rows = [batch.num_rows for batch in batches]
    lengths = {len(column) for batch in columns for column in batch}
    if sum(rows) != num_rows or any(n != BATCH_ROWS for n in rows[:-1]) or lengths - {*rows}:
        raise IndexFormatError(
            f"{path}: expected {num_rows} passages in batches of {BATCH_ROWS}, found {rows}"
        )
    return columns
