"""One run of a comparison: practise a curriculum, then attempt the tasks that are compared."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttt_adapt.curriculum.comparing.arms import Job
from ttt_adapt.curriculum.comparing.inputs import EVALUATION, OTHERS, read_part
from ttt_adapt.curriculum.comparing.results import (
    ArmRun,
    CurvePoint,
    RunCost,
    read_run,
    write_run,
)
from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.verifying import Verifier
from ttt_adapt.evaluation.solving import Attempts

if TYPE_CHECKING:
    from ttt_adapt.curriculum.training.history import StepRecord
    from ttt_adapt.models.language_model import LanguageModel

RunProgress = Callable[[str, int, int], None]
"""Gets what is under way (``training``, ``sampling``), how much of it is done, and in all."""

TRAINING, ATTEMPTS = "training", "attempts"


def finished_run(out: Path, job: Job) -> ArmRun | None:
    """The run, if it is done."""
    return read_run(out / job.folder)


def run_job(
    out: Path,
    job: Job,
    settings: ComparisonSettings,
    *,
    verifier: Verifier,
    progress: RunProgress | None = None,
) -> ArmRun:
    """Do one run, or read it where it is done; what an earlier call left unfinished goes on.

    The curriculum must be in the comparison's folder already.
    """
    done = finished_run(out, job)
    if done is not None:
        return done
    folder = out / job.folder
    model, curve, trained = _practise(out, job, settings, verifier, progress)
    started = time.monotonic()
    evaluation, others, num_tokens = _attempt(out, job, model, settings, verifier, progress)
    cost = RunCost(
        select_s=_select_seconds(out, job),
        train_s=trained.train_s,
        evaluate_s=time.monotonic() - started,
        num_rollouts=trained.num_rollouts,
        num_train_tokens=trained.num_train_tokens,
        num_evaluate_tokens=num_tokens,
    )
    run = ArmRun(
        arm=job.arm.name,
        seed=job.seed,
        evaluation=evaluation,
        others=others,
        cost=cost,
        curve=curve,
        num_zero_signal=sum(record.zero_signal_groups for record in _history(folder)),
        num_absent=sum(record.absent_rewards for record in _history(folder)),
    )
    write_run(folder, run)
    # A finished run does not go on: what it would go on from is the larger part of it.
    shutil.rmtree(folder / TRAINING / "checkpoints", ignore_errors=True)
    if not settings.keep_models:
        shutil.rmtree(folder / TRAINING / "model", ignore_errors=True)
        shutil.rmtree(folder / TRAINING / "adapter", ignore_errors=True)
    return run


def _practise(
    out: Path,
    job: Job,
    settings: ComparisonSettings,
    verifier: Verifier,
    progress: RunProgress | None,
) -> tuple[str, tuple[CurvePoint, ...], RunCost]:
    """Where the trained model is, and what training was like."""
    if job.curriculum is None:
        return settings.model, (), RunCost()
    from ttt_adapt.curriculum.selecting import read_curriculum
    from ttt_adapt.curriculum.training import TrainingProgress, train_curriculum

    curriculum = read_curriculum(out / job.curriculum)

    def report(now: TrainingProgress) -> None:
        if progress is not None:
            progress("training", now.record.step, now.num_steps)

    folder = out / job.folder / TRAINING
    result = train_curriculum(
        settings.model,
        curriculum.tasks,
        settings.training.model_copy(update={"seed": job.seed}),
        folder,
        verifier=verifier,
        progress=report,
    )
    curve = tuple(
        CurvePoint(record.step, record.num_rollouts, record.pass_rate)
        for record in _history(out / job.folder)
    )
    cost = RunCost(
        train_s=result.elapsed_s,
        num_rollouts=result.num_rollouts,
        num_train_tokens=result.num_tokens,
    )
    return str(result.model), curve, cost


def _attempt(
    out: Path,
    job: Job,
    model: str,
    settings: ComparisonSettings,
    verifier: Verifier,
    progress: RunProgress | None,
) -> tuple[tuple[Attempts, ...], tuple[Attempts, ...], int]:
    """Attempts at the tasks compared and at the others, and tokens drawn for them."""
    from ttt_adapt.config import ModelSettings
    from ttt_adapt.models.loading import load_language_model

    training = settings.training
    loaded = load_language_model(
        ModelSettings(name=model, dtype=training.dtype, device=training.device)
    )
    found: list[tuple[Attempts, ...]] = []
    total = 0
    for name, num_samples in (
        (EVALUATION, settings.sampling.num_samples),
        (OTHERS, settings.num_samples_others),
    ):
        tasks = read_part(out, name)
        attempts, num_tokens = (
            _sample(out / job.folder / ATTEMPTS / name, loaded, tasks, num_samples, job.seed,
                    settings, verifier, progress)
            if tasks
            else ((), 0)
        )  # fmt: skip
        found.append(attempts)
        total += num_tokens
    return found[0], found[1], total


def _sample(
    folder: Path,
    loaded: "LanguageModel",
    tasks: Sequence[Task],
    num_samples: int,
    seed: int,
    settings: ComparisonSettings,
    verifier: Verifier,
    progress: RunProgress | None,
) -> tuple[tuple[Attempts, ...], int]:
    from ttt_adapt.curriculum.sampling import sample_attempts

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("sampling", done, total)

    solved = sample_attempts(
        loaded.model,
        loaded.tokenizer,
        tasks,
        settings.sampling.model_copy(update={"num_samples": num_samples, "seed": seed}),
        verifier,
        progress=report,
        ledger=folder,
        fingerprint=loaded.fingerprint,
    )
    subset_of = {task.id: task.source for task in tasks}
    attempts = tuple(item.attempts(seed, subset_of[item.task_id]) for item in solved)
    num_tokens = sum(one.num_tokens for item in solved for one in item.completions)
    return attempts, num_tokens


def _history(folder: Path) -> list["StepRecord"]:
    from ttt_adapt.curriculum.training import read_history

    return read_history(folder / TRAINING)


def _select_seconds(out: Path, job: Job) -> float:
    if job.curriculum is None:
        return 0.0
    from ttt_adapt.curriculum.selecting import read_curriculum

    return sum(read_curriculum(out / job.curriculum).report.seconds.values())
