"""Task by task: what each arm makes of it, and the first tasks that it practised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ttt_adapt.curriculum.comparing.arms import BASE, Job, parse_arm
from ttt_adapt.curriculum.comparing.comparison import Comparison
from ttt_adapt.curriculum.comparing.rates import RewardGrid, reward_grid
from ttt_adapt.curriculum.comparing.results import read_run
from ttt_adapt.curriculum.comparing.wording import ranked
from ttt_adapt.curriculum.selecting import read_curriculum
from ttt_adapt.evaluation.solving import Estimate

FIRST_PICKS = 5


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One task.

    Attributes:
        rates: mean reward over seeds and completions, by arm, without intervals.
    """

    task_id: str
    subset: str
    rates: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class PracticedTask:
    """A task of a curriculum."""

    task_id: str
    text: str


def target_rows(folder: Path, comparison: Comparison) -> list[TargetRow]:
    """Tasks by what the best arm gained over base, most first; none where runs are gone."""
    grids: dict[str, RewardGrid] = {}
    for arm in comparison.arms:
        runs = [read_run(folder / Job(parse_arm(arm.name), s).folder) for s in comparison.seeds]
        found = [run for run in runs if run is not None]
        if len(found) < len(runs):
            return []
        grids[arm.name] = reward_grid([item for run in found for item in run.evaluation])
    first = next(iter(grids.values()))
    rows = [
        TargetRow(
            task_id,
            first.subsets[place],
            {
                name: Estimate(float(grid.values_ST[:, place].mean()), math.nan, math.nan, 1)
                for name, grid in grids.items()
            },
        )
        for place, task_id in enumerate(first.task_ids)
    ]
    best = ranked(comparison)[0].name

    def gain(row: TargetRow) -> float:
        base = row.rates[BASE].value if BASE in row.rates else 0.0
        value = row.rates[best].value - base
        return -value if math.isfinite(value) else math.inf

    return sorted(rows, key=lambda row: (gain(row), row.task_id))


def practised(folder: Path, comparison: Comparison) -> dict[str, list[PracticedTask]]:
    """The first picks of each arm that practises, under the first seed."""
    found = {}
    for arm in comparison.arms:
        place = Job(parse_arm(arm.name), comparison.seeds[0]).curriculum
        if place is None or not (folder / place).is_dir():
            continue
        tasks = read_curriculum(folder / place).tasks[:FIRST_PICKS]
        found[arm.name] = [PracticedTask(task.id, task.problem) for task in tasks]
    return found
