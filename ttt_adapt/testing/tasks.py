"""Tasks through the importer, from rows as a data set writes them."""

import json
from pathlib import Path
from typing import Any

from ttt_adapt.curriculum import Task, TaskSourceSettings, import_tasks


def write_rows(path: Path, *rows: Any) -> str:
    """A file of JSON lines; its path as settings take it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def imported_tasks(path: str, **settings: Any) -> list[Task]:
    """Every task that a file or folder holds."""
    return list(import_tasks(TaskSourceSettings(path=path, **settings)))


def imported_task(folder: Path, row: Any, name: str = "set.jsonl", **settings: Any) -> Task:
    """What one row, in a file of its own, becomes."""
    (task,) = imported_tasks(write_rows(folder / name, row), **settings)
    return task
