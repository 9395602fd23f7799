"""A curriculum, and its folder: ``tasks.jsonl``, ``selection.json``, ``report.md``.

Shape legend: N tasks chosen.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttt_adapt.curriculum.selecting.report import (
    SelectionReport,
    report_as_markdown,
    report_from_json,
    report_to_json,
)
from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.curriculum.task_files import read_tasks, write_tasks
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import TaskError
from ttt_adapt.settings import make_settings
from ttt_adapt.storage import atomic_write, sha256_file, write_json
from ttt_adapt.types import IntArray

TASKS_NAME = "tasks.jsonl"
JSON_NAME = "selection.json"
TEXT_NAME = "report.md"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Tasks to practise, in order of picking.

    Attributes:
        tasks: N, each once.
        indices: int64 ``[N]`` their positions in the corpus that was given.
        method: how they were chosen.
        noise_var: λ that was used, also where only the report depends on it.
        settings: the selection's, as given.
        report: what the choice is like.
    """

    tasks: tuple[Task, ...]
    indices: IntArray
    method: str
    noise_var: float
    settings: CurriculumSelectionSettings
    report: SelectionReport


def write_curriculum(folder: str | Path, curriculum: Curriculum) -> Path:
    """Write a curriculum into a folder, which is made if it is not there; return the folder.

    ``selection.json`` comes last: with it the folder is whole.

    Raises:
        TaskError: a task cannot be written as JSON.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / JSON_NAME).unlink(missing_ok=True)
    write_tasks(place / TASKS_NAME, curriculum.tasks)
    examples = [(task.id, task.problem) for task in curriculum.tasks[:10]]
    with atomic_write(place / TEXT_NAME, "w") as stream:
        stream.write(report_as_markdown(curriculum.report, examples))
    write_json(
        place / JSON_NAME,
        {
            "format_version": FORMAT_VERSION,
            "method": curriculum.method,
            "noise_var": curriculum.noise_var,
            "settings": curriculum.settings.model_dump(),
            "indices": curriculum.indices.tolist(),
            "tasks_sha256": sha256_file(place / TASKS_NAME),
            "report": report_to_json(curriculum.report),
        },
    )
    return place


def read_curriculum(folder: str | Path) -> Curriculum:
    """The curriculum that :func:`write_curriculum` wrote.

    Raises:
        TaskError: the folder holds none, an unfinished or a damaged one, or one of another format.
        SettingsError: its settings are none of this version.
    """
    place = Path(folder)
    values = _values(place / JSON_NAME)
    tasks_file = place / TASKS_NAME
    if not tasks_file.is_file() or sha256_file(tasks_file) != values.get("tasks_sha256"):
        raise TaskError(
            f"{tasks_file}: not the tasks that {JSON_NAME} describes; select the curriculum again"
        )
    tasks = tuple(read_tasks(tasks_file))
    try:
        curriculum = Curriculum(
            tasks=tasks,
            indices=np.asarray(values["indices"], dtype=np.int64),
            method=str(values["method"]),
            noise_var=float(values["noise_var"]),
            settings=make_settings(
                CurriculumSelectionSettings, values["settings"], where=str(place / JSON_NAME)
            ),
            report=report_from_json(values["report"]),
        )
        if curriculum.indices.shape != (len(tasks),):
            raise ValueError("as many positions as tasks expected")
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(place / JSON_NAME, error) from None
    except ValueError as error:
        if isinstance(error, TaskError) or type(error).__module__.startswith("ttt_adapt"):
            raise
        raise _damaged(place / JSON_NAME, error) from None
    return curriculum


def _values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise TaskError(
            f"{path}: no such file; expected a folder that `write_curriculum` finished writing"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None
    if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
        raise TaskError(
            f"{path}: expected a curriculum of format {FORMAT_VERSION}, found another; "
            "select it again"
        )
    return values


def _damaged(path: Path, error: Exception) -> TaskError:
    return TaskError(f"{path}: damaged ({type(error).__name__}: {error!s:.80}); select it again")
