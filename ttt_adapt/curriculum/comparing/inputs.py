"""What a comparison is about: its tasks as files of its own, and proof that they stay the same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttt_adapt.corpus.contamination import words
from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
from ttt_adapt.curriculum.task_files import read_tasks, write_tasks
from ttt_adapt.curriculum.tasks import Task, to_json
from ttt_adapt.errors import FingerprintMismatchError, TaskError
from ttt_adapt.settings import load_settings, to_toml
from ttt_adapt.storage import atomic_write, sha256_bytes, stable_hash, write_json

INPUTS_NAME, SETTINGS_NAME = "inputs.json", "settings.toml"
TARGETS, EVALUATION, OTHERS = "targets", "evaluation", "others"

EXTENSIBLE = {"arms", "seeds", "ks", "keep_models", "num_resamples", "level"}
"""Settings that may change from call to call: none of them changes a run that is done."""


@dataclass(frozen=True, slots=True)
class ComparisonTasks:
    """The tasks of a comparison.

    Attributes:
        targets: what curricula are chosen for; their answers are not looked at.
        evaluation: what arms are compared on: the targets, or others of their kind.
        others: tasks of other kinds, which show what was forgotten; may be empty.
    """

    targets: tuple[Task, ...]
    evaluation: tuple[Task, ...]
    others: tuple[Task, ...]


def require_unseen(corpus: Sequence[Task], tasks: ComparisonTasks) -> None:
    """Refuse a corpus that holds what is evaluated.

    Only equal words are found here; paraphrases are for ``decontaminate``.

    Raises:
        TaskError: with the first of them, and how many there are.
    """
    known: dict[str, str] = {}
    for task in (*tasks.targets, *tasks.evaluation, *tasks.others):
        known.setdefault(" ".join(words(task.problem)), task.id)
    given_away = [task for task in corpus if " ".join(words(task.problem)) in known]
    if given_away:
        first = given_away[0]
        target = known[" ".join(words(first.problem))]
        raise TaskError(
            f"{len(given_away)} tasks of the corpus are in the evaluation too, {first.id!r:.60} as "
            f"{target!r:.60} first; leave them out with `ttt-adapt curriculum decontaminate`"
        )


def settle(
    out: Path,
    corpus: Sequence[Task],
    tasks: ComparisonTasks,
    settings: ComparisonSettings,
    model_fingerprint: str,
) -> None:
    """Make ``out`` the folder of this comparison, or see that it is.

    Raises:
        FingerprintMismatchError: it is another comparison's.
    """
    parts = {
        "model": model_fingerprint,
        "corpus": tasks_hash(corpus),
        TARGETS: tasks_hash(tasks.targets),
        EVALUATION: tasks_hash(tasks.evaluation),
        OTHERS: tasks_hash(tasks.others),
        "settings": stable_hash(
            settings.model_dump(mode="json", exclude=EXTENSIBLE | {"model"})
            | {"selection": _selection(settings)}
        ),
    }
    path = out / INPUTS_NAME
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))["parts"]
        differing = [name for name, value in parts.items() if found.get(name) != value]
        if differing:
            raise FingerprintMismatchError(
                f"{out}: expected the comparison that is there, found another {', '.join(differing)}"
                "; choose another folder, or give what was given before"
            )
    for name, listed in (
        (TARGETS, tasks.targets),
        (EVALUATION, tasks.evaluation),
        (OTHERS, tasks.others),
    ):
        file = tasks_file(out, name)
        if listed and not file.is_file():
            write_tasks(file, listed)
    with atomic_write(out / SETTINGS_NAME, "w") as stream:
        stream.write(to_toml(settings) + "\n")
    if not path.is_file():
        write_json(path, {"model": settings.model, "num_corpus": len(corpus), "parts": parts})


def tasks_file(out: Path, name: str) -> Path:
    """Where the tasks of that part are."""
    return out / "tasks" / f"{name}.jsonl"


def read_part(out: Path, name: str) -> tuple[Task, ...]:
    """The tasks of a part; none where there are none."""
    file = tasks_file(out, name)
    return tuple(read_tasks(file)) if file.is_file() else ()


def read_settings(out: Path) -> ComparisonSettings:
    """The settings of the comparison in ``out``."""
    return load_settings(ComparisonSettings, out / SETTINGS_NAME)


def tasks_hash(tasks: Sequence[Task]) -> str:
    """SHA-256 of tasks in their order."""
    lines = (json.dumps(to_json(task), sort_keys=True) for task in tasks)
    return sha256_bytes("\n".join(lines).encode())


def _selection(settings: ComparisonSettings) -> dict[str, object]:
    # The policy's folder may move; what its vectors depend on is its fingerprint.
    return settings.selection.model_dump(mode="json", exclude={"method", "seed", "model"})
