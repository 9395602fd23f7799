"""Tasks in files: JSON lines, plain or compressed, one task a line."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import CorpusFile, locate
from ttt_adapt.corpus.jsonl import parse_object
from ttt_adapt.corpus.problems import Malformed, Problem, ReadProblems, explain
from ttt_adapt.corpus.streams import STREAM_ERRORS, numbered_lines, open_stream, too_long
from ttt_adapt.curriculum.tasks import Task, from_json, to_json
from ttt_adapt.errors import TaskError
from ttt_adapt.storage import atomic_path

MAX_LINE_BYTES = 64 * 2**20

OnError = Literal["fail", "skip"]


def read_tasks(
    path: str | Path, *, on_error: OnError = "fail", problems: ReadProblems | None = None
) -> Iterator[Task]:
    """Tasks of a ``.jsonl`` file (also ``.zst``, ``.gz``), a pattern or a folder, in order.

    Args:
        on_error: ``fail``: the first line that is no task raises. ``skip``: it is counted.
        problems: receives counts, and lines that were skipped.

    Raises:
        CorpusError: nothing is there to read.
        TaskError: a line is no task, or has the id of one before; or no line is a task.
    """
    if on_error not in ("fail", "skip"):
        raise TaskError(f"on_error: expected 'fail' or 'skip', found {on_error!r}")
    place = locate(CorpusSettings(path=str(path), format="jsonl"))
    found = problems if problems is not None else ReadProblems()
    return _tasks(str(path), place.files, on_error, found)


def _tasks(
    path: str, files: tuple[CorpusFile, ...], on_error: OnError, found: ReadProblems
) -> Iterator[Task]:
    seen: set[str] = set()
    for file in files:
        found.num_files += 1
        for location, item in _items(file):
            if isinstance(item, Task) and item.id in seen:
                item = Problem(location, f"id {item.id!r:.80} is another task's already")
            if isinstance(item, Problem):
                if on_error == "fail":
                    raise TaskError(
                        f"{item.location}: {item.reason}; mend it, or set on_error to 'skip'"
                    )
                found.add(item)
                continue
            seen.add(item.id)
            found.num_documents += 1
            yield item
    if not seen:
        raise TaskError(f"{path}: no task found; {found.summary()}")


def _items(file: CorpusFile) -> Iterator[tuple[str, Task | Problem]]:
    number = 0
    try:
        with open_stream(file.path) as stream:
            for number, line in numbered_lines(stream, MAX_LINE_BYTES):
                location = f"{file.label}:{number}"
                if line is None:
                    yield location, Problem(location, too_long(MAX_LINE_BYTES))
                elif not line.isspace():
                    yield location, _task(line, location)
    except STREAM_ERRORS as error:
        location = f"{file.label}:{number + 1}"
        yield location, Problem(location, f"cannot be read on: {explain(error)}")


def _task(line: bytes, location: str) -> Task | Problem:
    try:
        return from_json(parse_object(line))
    except (Malformed, TaskError) as error:
        return Problem(location, str(error))


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> int:
    """Write tasks as JSON lines, compressed where the name ends in ``.zst``; all or nothing.

    Returns how many there were.

    Raises:
        TaskError: two have the same id, a value has no JSON or UTF-8 form, or the name is none of
            a task file.
    """
    place = Path(path)
    if place.suffixes[-1:] != [".jsonl"] and place.suffixes[-2:] != [".jsonl", ".zst"]:
        raise TaskError(f"{path}: expected a name ending in .jsonl or .jsonl.zst")
    seen: set[str] = set()
    with atomic_path(place) as temporary, _output(temporary, is_zstd=place.suffix == ".zst") as out:
        for task in tasks:
            if task.id in seen:
                raise TaskError(f"{path}: two tasks have the id {task.id!r:.80}")
            seen.add(task.id)
            out.write(_line(task))
    return len(seen)


@contextlib.contextmanager
def _output(path: Path, *, is_zstd: bool) -> Iterator[Any]:
    if not is_zstd:
        with path.open("wb") as stream:
            yield stream
        return
    import pyarrow

    with pyarrow.OSFile(str(path), "wb") as raw, pyarrow.CompressedOutputStream(raw, "zstd") as out:
        yield out


def _line(task: Task) -> bytes:
    try:
        return json.dumps(to_json(task), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"task {task.id!r:.80} cannot be written as JSON: {explain(error)}"
        ) from None
