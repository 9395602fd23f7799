"""What a comparison would do and cost, without doing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttt_adapt.curriculum.comparing.comparing import comparison_jobs
from ttt_adapt.curriculum.comparing.running import finished_run
from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.training.settings import GRPOSettings


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """What is left to do.

    Attributes:
        num_runs: arms times seeds.
        num_finished: of these.
        steps_per_run: of training.
        rollouts_per_run: completions drawn in training.
        attempts_per_run: completions drawn in evaluation.
        num_rollouts_left: to draw in training, in all runs.
        num_attempts_left: to draw in evaluation, in all runs.
        max_completion_tokens: of these completions: no more than this in all.
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    num_corpus: int
    num_targets: int
    num_evaluation: int
    num_others: int
    num_runs: int
    num_finished: int
    steps_per_run: int
    rollouts_per_run: int
    attempts_per_run: int
    num_rollouts_left: int
    num_attempts_left: int
    max_completion_tokens: int


def plan_comparison(
    corpus: Sequence[Task],
    targets: Sequence[Task],
    settings: ComparisonSettings,
    out: Path,
    *,
    evaluation: Sequence[Task] | None = None,
    others: Sequence[Task] = (),
) -> ComparisonPlan:
    """The plan of :func:`~ttt_adapt.curriculum.comparing.compare_curricula` with these arguments."""
    compared = targets if evaluation is None else evaluation
    jobs = comparison_jobs(settings)
    left = [job for job in jobs if finished_run(out, job) is None]
    eligible = sum(not task.meta.get("evaluation_only") for task in corpus)
    num_steps = training_steps(min(settings.selection.num_select, eligible), settings.training)
    rollouts = num_steps * settings.training.prompts_per_step * settings.training.num_generations
    attempts = len(compared) * settings.sampling.num_samples
    attempts += len(others) * settings.num_samples_others
    num_practising = sum(job.arm.method is not None for job in left)
    return ComparisonPlan(
        arms=settings.arms,
        seeds=settings.seeds,
        num_corpus=len(corpus),
        num_targets=len(targets),
        num_evaluation=len(compared),
        num_others=len(others),
        num_runs=len(jobs),
        num_finished=len(jobs) - len(left),
        steps_per_run=num_steps,
        rollouts_per_run=rollouts,
        attempts_per_run=attempts,
        num_rollouts_left=num_practising * rollouts,
        num_attempts_left=len(left) * attempts,
        max_completion_tokens=num_practising * rollouts * settings.training.max_completion_tokens
        + len(left) * attempts * settings.sampling.max_new_tokens,
    )


def training_steps(num_tasks: int, settings: GRPOSettings) -> int:
    """Steps of a training run over so many tasks."""
    from ttt_adapt.curriculum.training.schedule import steps_of_epochs

    return settings.num_steps or steps_of_epochs(
        num_tasks, settings.epochs, settings.prompts_per_step
    )
