"""How often a model solves tasks: attempts kept in a folder, rates by source, a summary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum.comparing.files import finite_json
from ttt_adapt.curriculum.sampling import ATTEMPTS_NAME, sample_attempts
from ttt_adapt.curriculum.sampling_settings import SamplingSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.verifying import Verifier
from ttt_adapt.evaluation.solving import SolveRates, solve_rates
from ttt_adapt.models.loading import load_language_model
from ttt_adapt.storage import write_json

SUMMARY_NAME = "summary.json"


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """What a model makes of some tasks.

    Attributes:
        rates: over all tasks.
        by_source: of each source.
        num_tokens: of completions.
        num_too_long: tasks whose prompts the model has no room for; they count nowhere.
        attempts: the file with every completion.
    """

    model: str
    rates: SolveRates
    by_source: Mapping[str, SolveRates]
    num_tokens: int
    num_too_long: int
    attempts: Path


def evaluate_tasks(
    model: ModelSettings,
    tasks: Sequence[Task],
    settings: SamplingSettings,
    out: Path,
    verifier: Verifier,
    *,
    ks: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> TaskEvaluation:
    """Attempt tasks and write ``attempts.jsonl`` and ``summary.json`` into ``out``.

    The same call draws only what is missing.

    Args:
        ks: of pass@k and maj@k; empty: 1 and ``settings.num_samples``.

    Raises:
        TaskError, ModelError: as :func:`~ttt_adapt.curriculum.sample_attempts`.
        UserError: a k above the number of samples.
    """
    verifier.require(tasks)
    lm = load_language_model(model)
    solved = sample_attempts(
        lm.model,
        lm.tokenizer,
        tasks,
        settings,
        verifier,
        progress=progress,
        ledger=out,
        fingerprint=lm.fingerprint,
    )
    attempts = [
        item.attempts(settings.seed, task.source) for item, task in zip(solved, tasks, strict=True)
    ]
    at = tuple(sorted(set(ks or (1, settings.num_samples))))
    sources = dict.fromkeys(task.source for task in tasks)
    found = TaskEvaluation(
        model=model.name,
        rates=solve_rates(attempts, ks=at),
        by_source={
            name: solve_rates([item for item in attempts if item.subset == name], ks=at)
            for name in sources
        },
        num_tokens=sum(one.num_tokens for item in solved for one in item.completions),
        num_too_long=sum(not item.completions for item in solved),
        attempts=out / ATTEMPTS_NAME,
    )
    write_json(out / SUMMARY_NAME, evaluation_as_json(found, settings))
    return found


def evaluation_as_json(found: TaskEvaluation, settings: SamplingSettings) -> dict[str, Any]:
    """JSON values; NaN becomes ``None``."""
    values: dict[str, Any] = finite_json(asdict(found))
    values["attempts"] = found.attempts.name
    return {**values, "settings": settings.model_dump(mode="json")}
