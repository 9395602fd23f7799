"""Rows of any table or folder of JSON files, each with its place: what importers read."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import HUB_PREFIX, CorpusFile, format_of, label_of, locate
from ttt_adapt.corpus.hub import hub_label
from ttt_adapt.corpus.jsonl import parse_object
from ttt_adapt.corpus.problems import Malformed, Problem, ReadProblems, explain
from ttt_adapt.corpus.records import json_value
from ttt_adapt.corpus.streams import STREAM_ERRORS, numbered_lines, open_stream, too_long
from ttt_adapt.curriculum.settings import TaskSourceSettings
from ttt_adapt.errors import CorpusError

MAX_ROW_BYTES = 256 * 2**20
BATCH_ROWS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One record.

    Attributes:
        location: ``file.jsonl:17``, ``folder/file.json``, ``owner/name/train:17``.
        stem: the file's name without endings, or the data set's name.
        values: its columns, as JSON values.
    """

    location: str
    stem: str
    values: dict[str, Any]


def read_rows(settings: TaskSourceSettings, found: ReadProblems) -> Iterator[Row | Problem]:
    """Rows in an order that is the same on every run.

    Raises:
        CorpusError: nothing is there to read, or the hub data set cannot be opened.
    """
    if settings.path.startswith(HUB_PREFIX):
        yield from _hub_rows(settings)
        return
    for file in _files(settings.path):
        found.num_files += 1
        if _is_json(file.path):
            yield from _json_rows(file)
        elif format_of(file.path) == "jsonl":
            yield from _jsonl_rows(file)
        else:
            yield from _table_rows(file)


def row_stem(label: str) -> str:
    """A file's name without its folder and endings: ``gsm8k-train`` of ``x/gsm8k-train.jsonl.zst``."""
    return label.rpartition("/")[2].partition(".")[0]


def _files(path: str) -> tuple[CorpusFile, ...]:
    root = Path(path).expanduser()
    if root.is_file() and _is_json(root):
        return (CorpusFile(root, label_of(root.name)),)
    if root.is_dir():
        names = sorted(
            os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118
            for folder, _, files in os.walk(root)
            for name in files
            if _is_json(Path(name)) and not name.startswith(".")
        )
        if names:
            return tuple(CorpusFile(root / name, label_of(name)) for name in names)
    place = locate(CorpusSettings(path=path))
    if place.format not in ("jsonl", "parquet", "arrow"):
        raise CorpusError(
            f"{path}: expected tasks as .jsonl (also .zst, .gz), .json, .parquet or .arrow, found "
            f"{place.format}"
        )
    return place.files


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _jsonl_rows(file: CorpusFile) -> Iterator[Row | Problem]:
    number = 0
    stem = row_stem(file.label)
    try:
        with open_stream(file.path) as stream:
            for number, line in numbered_lines(stream, MAX_ROW_BYTES):
                location = f"{file.label}:{number}"
                if line is None:
                    yield Problem(location, too_long(MAX_ROW_BYTES))
                elif not line.isspace():
                    try:
                        yield Row(location, stem, parse_object(line))
                    except Malformed as error:
                        yield Problem(location, str(error))
    except STREAM_ERRORS as error:
        yield Problem(f"{file.label}:{number + 1}", f"cannot be read on: {explain(error)}")


def _json_rows(file: CorpusFile) -> Iterator[Row | Problem]:
    """One row of a file that is an object, one for each item of a file that is a list."""
    stem = row_stem(file.label)
    try:
        value = json.loads(file.path.read_bytes())
        if isinstance(value, dict):
            yield Row(file.label, stem, parse_object(json.dumps(value).encode()))
            return
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(file.label, f"cannot be read: {explain(error)}")
        return
    if not isinstance(value, list):
        yield Problem(file.label, "expected an object or a list of objects")
        return
    for number, item in enumerate(value, start=1):
        location = f"{file.label}:{number}"
        try:
            yield Row(location, stem, parse_object(json.dumps(item).encode()))
        except Malformed as error:
            yield Problem(location, str(error))


def _table_rows(file: CorpusFile) -> Iterator[Row | Problem]:
    import pyarrow
    import pyarrow.dataset

    number = 0
    kind = "parquet" if file.path.suffix.lower() == ".parquet" else "ipc"
    try:
        table = pyarrow.dataset.dataset(str(file.path), format=kind)
        for batch in table.to_batches(batch_size=BATCH_ROWS, use_threads=False):
            for values in batch.to_pylist():
                number += 1
                columns = {str(name): json_value(value) for name, value in values.items()}
                yield Row(f"{file.label}:{number}", row_stem(file.label), columns)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        yield Problem(f"{file.label}:{number + 1}", f"cannot be read on: {explain(error)}")


def _hub_rows(settings: TaskSourceSettings) -> Iterator[Row | Problem]:
    import datasets

    corpus = CorpusSettings(
        path=settings.path, split=settings.split, hub_config=settings.hub_config
    )
    label = hub_label(corpus)
    stem = row_stem(label.removesuffix(f"/{settings.split}"))
    try:
        rows = datasets.load_dataset(
            settings.path.removeprefix(HUB_PREFIX),
            settings.hub_config,
            split=settings.split,
            streaming=True,
        )
    except Exception as error:
        raise CorpusError(
            f"hub data set {label}: cannot be opened: {explain(error)}; "
            "check its name, hub_config and split, and the way to the hub"
        ) from error
    iterator = iter(rows)
    number = 0
    while True:
        number += 1
        try:
            values = next(iterator, None)
        except Exception as error:  # noqa: BLE001 - builders raise whatever they meet
            yield Problem(
                f"{label}:{number}", f"cannot be read on: {type(error).__name__}: {explain(error)}"
            )
            return
        if values is None:
            return
        columns = {str(name): json_value(value) for name, value in values.items()}
        yield Row(f"{label}:{number}", stem, columns)
