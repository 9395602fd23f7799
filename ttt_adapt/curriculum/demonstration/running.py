"""The demonstration from end to end: make the model, compare curricula in both scenarios, draw."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ttt_adapt.curriculum.comparing import (
    Comparison,
    ComparisonProgress,
    ComparisonSettings,
    compare_curricula,
)
from ttt_adapt.curriculum.demonstration.pretraining import HabitSettings, pretrain
from ttt_adapt.curriculum.demonstration.scenarios import SCENARIOS, Scenario, scenario
from ttt_adapt.curriculum.sampling_settings import SamplingSettings
from ttt_adapt.curriculum.selecting import CurriculumSelectionSettings
from ttt_adapt.curriculum.training import GRPOSettings
from ttt_adapt.settings import Settings

PositiveInt = Annotated[int, Field(ge=1)]
MAX_ANSWER_TOKENS = 6
"""Four digits, the end, and one more."""


class DemonstrationSettings(Settings):
    """The demonstration. Owner: ``ttt_adapt.curriculum.demonstration``."""

    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    arms: tuple[str, ...] = (
        "base",
        "random",
        "nearest",
        "round-robin",
        "sift",
        "sift@0.1",
    )
    seeds: tuple[int, ...] = (0, 1, 2)
    num_corpus: PositiveInt = 6000
    num_select: PositiveInt = 256
    """Tasks of a curriculum."""
    num_evaluation: PositiveInt = 96
    num_other: PositiveInt = 8
    """Of each family that is no target: what was forgotten."""
    num_samples: PositiveInt = 8
    num_steps: PositiveInt = 30
    num_steps_single: PositiveInt = 6
    """Where all targets are of one family. It is learned in few steps, and after many more every way
    to choose has the same perfect score."""
    prompts_per_step: PositiveInt = 16
    num_generations: Annotated[int, Field(ge=2)] = 16
    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-4
    pretraining: HabitSettings = HabitSettings()
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the tasks that are drawn."""

    def steps_of(self, name: str) -> int:
        """Training steps of a run in a scenario."""
        return self.num_steps_single if name == "single" else self.num_steps

    def num_rollouts(self, name: str) -> int:
        """Of one run in a scenario."""
        return self.steps_of(name) * self.prompts_per_step * self.num_generations

    @property
    def num_runs(self) -> int:
        """That practise, in one scenario."""
        return len(self.seeds) * len([arm for arm in self.arms if arm != "base"])


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the demonstration found.

    Attributes:
        comparisons: by scenario.
        reports: HTML pages, by scenario.
    """

    comparisons: dict[str, Comparison]
    reports: dict[str, Path]
    elapsed_s: float


def run_demonstration(
    out: Path,
    settings: DemonstrationSettings | None = None,
    *,
    workers: int = 2,
    draw: bool = True,
    report: Callable[[str], None] = print,
    progress: Callable[[str, int, int], None] | None = None,
) -> Demonstration:
    """Make the model (once), compare curricula in every scenario, write the reports.

    The same call continues what was interrupted.

    Args:
        out: folder: ``model/`` and one comparison a scenario.
        workers: processes of one thread each; 0: this one alone.
        draw: whether to draw the reports, which needs matplotlib.
        report: gets lines for people.
        progress: gets what is under way, how much of it is done, and in all.
    """
    settings = settings or DemonstrationSettings()
    started = time.monotonic()
    drawn = {name: demonstration_scenario(settings, name) for name in settings.scenarios}
    report("1/2  a model of characters that can do what twelve families ask, and usually does not")
    unseen = [
        task
        for found in drawn.values()
        for task in (*found.targets, *found.evaluation, *found.others)
    ]
    model = pretrain(
        out / "model",
        settings.pretraining,
        without=unseen,
        progress=lambda done, total: progress("pretraining", done, total) if progress else None,
    )
    comparisons: dict[str, Comparison] = {}
    reports: dict[str, Path] = {}
    for name, tasks in drawn.items():
        report(f"2/2  {name}: {_described(tasks)}")

        def step(now: ComparisonProgress, name: str = name) -> None:
            if progress is not None:
                label = f"{name}: run {now.runs_done}/{now.num_runs}, {now.stage} {now.arm}"
                progress(label, now.done, now.total)

        comparisons[name] = compare_curricula(
            tasks.corpus,
            tasks.targets,
            demonstration_comparison(settings, model, name),
            out / name,
            evaluation=tasks.evaluation,
            others=tasks.others,
            workers=workers,
            progress=step,
        )
        if draw:
            from ttt_adapt.curriculum.comparing.page import write_comparison_report

            reports[name] = write_comparison_report(out / name, out / name / "report")[0]
    return Demonstration(comparisons, reports, time.monotonic() - started)


def demonstration_scenario(settings: DemonstrationSettings, name: str) -> Scenario:
    """The tasks of a scenario under these settings."""
    return scenario(
        name,
        seed=settings.seed,
        num_corpus=settings.num_corpus,
        num_evaluation=settings.num_evaluation,
        num_other=settings.num_other,
    )


def demonstration_comparison(
    settings: DemonstrationSettings, model: Path, name: str
) -> ComparisonSettings:
    """What is compared, and how, in a scenario."""
    return ComparisonSettings(
        model=str(model),
        arms=settings.arms,
        seeds=settings.seeds,
        selection=CurriculumSelectionSettings(
            num_select=settings.num_select, batch_size=256, device="cpu"
        ),
        training=GRPOSettings(
            num_steps=settings.steps_of(name),
            prompts_per_step=settings.prompts_per_step,
            num_generations=settings.num_generations,
            learning_rate=settings.learning_rate,
            max_completion_tokens=MAX_ANSWER_TOKENS,
            save_every=settings.steps_of(name),
            device="cpu",
        ),
        sampling=SamplingSettings(
            num_samples=settings.num_samples,
            temperature=0.6,
            top_p=1.0,
            max_new_tokens=MAX_ANSWER_TOKENS,
            batch_size=512,
        ),
        num_samples_others=4,
    )


def plan_demonstration(settings: DemonstrationSettings | None = None) -> dict[str, Any]:
    """What the demonstration would do, without doing it."""
    settings = settings or DemonstrationSettings()
    num_others = settings.num_other * 4
    rollouts = {name: settings.num_rollouts(name) for name in settings.scenarios}
    evaluated = settings.num_evaluation * settings.num_samples
    return {
        "scenarios": list(settings.scenarios),
        "arms": list(settings.arms),
        "seeds": list(settings.seeds),
        "num_training_runs": settings.num_runs * len(settings.scenarios),
        "rollouts_per_run": rollouts,
        "num_rollouts": settings.num_runs * sum(rollouts.values()),
        "attempts_per_run_at_least": evaluated + num_others,
        "pretraining_steps": settings.pretraining.num_steps,
    }


def _described(tasks: Scenario) -> str:
    families = list(dict.fromkeys(task.source for task in tasks.targets))
    return (
        f"{len(tasks.targets)} targets of {', '.join(families)}; a corpus of "
        f"{len(tasks.corpus):,} tasks"
    )
