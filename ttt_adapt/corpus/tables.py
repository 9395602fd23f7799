"""Parquet and Arrow files, a few rows in memory at a time."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import CorpusFile
from ttt_adapt.corpus.problems import Malformed, Problem, explain
from ttt_adapt.corpus.records import Record, json_value, needed_columns, record_of

BATCH_ROWS = 128
ARROW_FILE_MAGIC = b"ARROW1"


def read_table(file: CorpusFile, settings: CorpusSettings) -> Iterator[Record | Problem]:
    """Records of one Parquet or Arrow file (IPC file or stream), located by row from 1.

    Only the columns that documents are made of are read. A row that cannot be used is a problem
    of its own; a file that is damaged or lacks a column ends with one.
    """
    import pyarrow

    row = 0
    try:
        for batch in _batches(file, settings):
            names = batch.schema.names
            for position in range(batch.num_rows):
                row += 1
                yield _record(batch, names, position, settings, f"{file.label}:{row}")
    except Malformed as error:
        yield Problem(file.label, str(error))
    except (OSError, pyarrow.ArrowException) as error:
        where = f"{file.label}:{row + 1}" if row else file.label
        yield Problem(where, f"cannot be read{' on' if row else ''}: {explain(error)}")


def _record(
    batch: Any, names: list[str], position: int, settings: CorpusSettings, location: str
) -> Record | Problem:
    try:
        values = {
            name: json_value(column[position].as_py())
            for name, column in zip(names, batch.columns, strict=True)
        }
        return record_of(values, settings, location)
    except Malformed as error:
        return Problem(location, str(error))
    except UnicodeDecodeError as error:
        return Problem(location, f"invalid UTF-8 at byte {error.start}: {error.reason}")


def _batches(file: CorpusFile, settings: CorpusSettings) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    with ExitStack() as stack:
        # Read, not mapped: a mapped file that shrinks meanwhile kills the process.
        source = stack.enter_context(pyarrow.OSFile(os.fspath(file.path)))
        if file.path.suffix.lower() == ".parquet" or settings.format == "parquet":
            table = stack.enter_context(pyarrow.parquet.ParquetFile(source))
            columns = _checked(table.schema_arrow, settings)
            yield from table.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            return
        if source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
            reader = stack.enter_context(pyarrow.ipc.open_file(source))
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            source.seek(0)
            reader = stack.enter_context(pyarrow.ipc.open_stream(source))
            batches = iter(reader)
        columns = _checked(reader.schema, settings)
        for batch in batches:
            chosen = batch.select(columns)
            # Offsets of a damaged file may point anywhere; reading them unchecked can crash.
            chosen.validate(full=True)
            yield chosen


def _checked(schema: Any, settings: CorpusSettings) -> list[str]:
    """Names of the columns to read, once the text column is known to be there and of strings."""
    import pyarrow

    columns = needed_columns(schema.names, settings)
    if settings.text_column in schema.names:
        kind = schema.field(settings.text_column).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        strings = (
            pyarrow.types.is_string,
            pyarrow.types.is_large_string,
            pyarrow.types.is_string_view,
            pyarrow.types.is_null,
        )
        if not any(test(value) for test in strings):
            raise Malformed(
                f"column {settings.text_column!r}: expected strings, found {kind}; "
                f"columns: {', '.join(schema.names)}"
            )
    return columns
