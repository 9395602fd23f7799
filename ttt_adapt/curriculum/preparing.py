"""Corpora on disk: imported, without duplicates, without what gives the targets away.

Each function writes next to its result what it was made from, and does nothing where the same is
there already.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.corpus.problems import ReadProblems
from ttt_adapt.curriculum.decontamination import decontaminate
from ttt_adapt.curriculum.decontamination_report import write_decontamination
from ttt_adapt.curriculum.duplicates import deduplicate
from ttt_adapt.curriculum.importers.importing import import_tasks
from ttt_adapt.curriculum.settings import DecontaminationSettings, TaskSourceSettings
from ttt_adapt.curriculum.task_files import write_tasks
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.storage import sha256_file, stable_hash, write_json

RECORD_ENDING = ".made-from.json"
TASKS_NAME = "tasks.jsonl.zst"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """A file of tasks and how it came to be.

    Attributes:
        path: of the tasks.
        num_tasks: in it.
        num_read: tasks read.
        num_duplicates: left out, as others ask the same.
        num_contaminated: left out, as they give a target away.
        problems: lines or rows that could not be read; empty if there were none.
        by_kind: tasks in it.
        is_new: whether this call made it.
    """

    path: Path
    num_tasks: int
    num_read: int
    num_duplicates: int
    num_contaminated: int
    problems: str
    by_kind: dict[str, int]
    is_new: bool = True


def tasks_of(path: str | Path, *, max_tasks: int | None = None) -> list[Task]:
    """Tasks of a file, folder or hub data set, in this project's format or a known layout.

    Raises:
        CorpusError, TaskError: as :func:`~ttt_adapt.curriculum.import_tasks`.
    """
    return list(import_tasks(TaskSourceSettings(path=str(path), max_tasks=max_tasks)))


def import_corpus(
    settings: TaskSourceSettings, out: Path, *, without_duplicates: bool = False
) -> PreparedCorpus:
    """Write the tasks of a data set to ``out`` (``.jsonl`` or ``.jsonl.zst``).

    Args:
        without_duplicates: leave out tasks that ask what an earlier one does.

    Raises:
        CorpusError, TaskError: as :func:`~ttt_adapt.curriculum.import_tasks` and ``write_tasks``.
    """
    key = stable_hash(
        {
            "settings": settings.model_dump(mode="json"),
            "files": _state(settings.path),
            "without_duplicates": without_duplicates,
        }
    )
    found = _recorded(out, key)
    if found is not None:
        return found
    problems = ReadProblems()
    tasks = list(import_tasks(settings, problems=problems))
    kept: Sequence[Task] = tasks
    if without_duplicates:
        kept = deduplicate(tasks).kept
    return _write(
        out, kept, key, num_read=len(tasks), num_duplicates=len(tasks) - len(kept),
        num_contaminated=0, problems=problems.summary() if problems.num_skipped else "",
    )  # fmt: skip


def decontaminate_corpus(
    corpus: str | Path,
    targets: Sequence[str | Path],
    out: Path,
    settings: DecontaminationSettings | None = None,
    *,
    without_duplicates: bool = True,
) -> PreparedCorpus:
    """Write into the folder ``out`` the tasks that give no target away, and the report.

    Args:
        corpus, targets: as :func:`tasks_of` reads them.

    Raises:
        TaskError: no targets, or one without words: nothing passes unchecked.
    """
    settings = settings or DecontaminationSettings()
    key = stable_hash(
        {
            "settings": settings.model_dump(mode="json"),
            "corpus": [str(corpus), _state(corpus)],
            "targets": [[str(path), _state(path)] for path in targets],
            "without_duplicates": without_duplicates,
        }
    )
    found = _recorded(out / TASKS_NAME, key)
    if found is not None:
        return found
    tasks = tasks_of(corpus)
    held_against = [task for path in targets for task in tasks_of(path)]
    duplicates = deduplicate(tasks, settings) if without_duplicates else None
    kept = duplicates.kept if duplicates is not None else tuple(tasks)
    result = decontaminate(kept, held_against, settings)
    out.mkdir(parents=True, exist_ok=True)
    write_decontamination(out, result, duplicates)
    return _write(
        out / TASKS_NAME, result.kept, key, num_read=len(tasks),
        num_duplicates=len(tasks) - len(kept), num_contaminated=len(result.left_out), problems="",
    )  # fmt: skip


def _write(out: Path, tasks: Sequence[Task], key: str, **counts: Any) -> PreparedCorpus:
    record = _record_path(out)
    record.unlink(missing_ok=True)
    write_tasks(out, tasks)
    by_kind: dict[str, int] = {}
    for task in tasks:
        by_kind[task.kind] = by_kind.get(task.kind, 0) + 1
    made = PreparedCorpus(path=out, num_tasks=len(tasks), by_kind=by_kind, **counts)
    values = {**asdict(made), "path": out.name}
    write_json(
        record,
        {
            "format_version": FORMAT_VERSION,
            "key": key,
            "sha256": sha256_file(out),
            "result": {name: value for name, value in values.items() if name != "is_new"},
        },
    )
    return made


def _recorded(out: Path, key: str) -> PreparedCorpus | None:
    """What an earlier call made of the same; ``None`` where it is another or was changed since."""
    try:
        record = json.loads(_record_path(out).read_text(encoding="utf-8"))
        is_same = record["format_version"] == FORMAT_VERSION and record["key"] == key
        if not is_same or sha256_file(out) != record["sha256"]:
            return None
        return PreparedCorpus(**{**record["result"], "path": out, "is_new": False})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_path(out: Path) -> Path:
    return out.with_name(out.name + RECORD_ENDING)


def _state(path: str | Path) -> list[list[Any]]:
    """Size and time of each file, so that a changed source is read again; none of a hub's."""
    place = Path(path)
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    return [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns]
        for file in files
        if file.is_file()
    ]
