"""What one run of a comparison came to: its file, and reading it back."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.solving import Attempts
from ttt_adapt.storage import write_json

RESULT_NAME = "result.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run took. Seconds are wall-clock, on whatever the run shared its machine with.

    Attributes:
        select_s: embedding and choosing; embeddings that another arm left are free.
        train_s: training, over all sessions.
        evaluate_s: sampling and verifying.
        num_rollouts: completions drawn in training.
        num_train_tokens: of prompts and completions, in training.
        num_evaluate_tokens: of completions, in evaluation.
    """

    select_s: float = 0.0
    train_s: float = 0.0
    evaluate_s: float = 0.0
    num_rollouts: int = 0
    num_train_tokens: int = 0
    num_evaluate_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One training step: share of completions that were right, of those that could be verified."""

    step: int
    num_rollouts: int
    pass_rate: float | None


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm under one seed.

    Attributes:
        arm: its name.
        evaluation: attempts at the tasks that are compared.
        others: attempts at tasks that show what was forgotten; may be empty.
        curve: of training; empty for the base model.
        num_zero_signal: groups that taught nothing.
        num_absent: training completions that could not be verified.
    """

    arm: str
    seed: int
    evaluation: tuple[Attempts, ...]
    others: tuple[Attempts, ...]
    cost: RunCost
    curve: tuple[CurvePoint, ...] = ()
    num_zero_signal: int = 0
    num_absent: int = 0


def write_run(folder: Path, run: ArmRun) -> None:
    """Write a finished run; with this file the run is not done again."""
    values = asdict(run)
    write_json(folder / RESULT_NAME, {"format_version": FORMAT_VERSION, **values})


def read_run(folder: Path) -> ArmRun | None:
    """The run that :func:`write_run` wrote; ``None`` where none is finished.

    Raises:
        UserError: the file is damaged or of another format.
    """
    path = folder / RESULT_NAME
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format_version") != FORMAT_VERSION:
            raise ValueError("another format")
        return ArmRun(
            **{
                **values,
                "evaluation": _attempts(values["evaluation"]),
                "others": _attempts(values["others"]),
                "cost": RunCost(**values["cost"]),
                "curve": tuple(CurvePoint(**point) for point in values["curve"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: expected a finished run, found something else ({type(error).__name__}: "
            f"{error!s:.80}); delete the file, and the same command does the run again"
        ) from None


def _attempts(values: Sequence[dict[str, Any]]) -> tuple[Attempts, ...]:
    return tuple(
        Attempts(**{**item, "rewards": tuple(item["rewards"]), "answers": tuple(item["answers"])})
        for item in values
    )
