"""Which tasks are practised in which step; and which are chosen again by how often they succeed."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.runtime import derived_seed


class Reselect(Protocol):
    """Chooses the tasks to go on with."""

    def __call__(
        self, pass_rates: Mapping[str, float], *, step: int, band: tuple[float, float]
    ) -> Sequence[Task]:
        """The new curriculum, in order.

        Args:
            pass_rates: mean reward by task id, of each practised task's last group.
            step: steps done so far.
            band: of pass rates that a task may have to be chosen again.
        """
        ...


def within_band(
    tasks: Sequence[Task],
    pass_rates: Mapping[str, float],
    *,
    band: tuple[float, float],
    at_least: int,
) -> list[Task]:
    """Tasks not practised yet, and those whose pass rate lies in the band; in the order given.

    If these are fewer than ``at_least``, the tasks nearest to the band's middle make up for it.

    Source: TTC-RL's re-selection within an achievability band (``jonhue/ttc``).
    """
    low, high = band
    middle = (low + high) / 2

    def distance(task: Task) -> float:
        rate = pass_rates.get(task.id)
        return 0.0 if rate is None or low <= rate <= high else abs(rate - middle)

    ranked = sorted(range(len(tasks)), key=lambda position: (distance(tasks[position]), position))
    num_inside = sum(distance(task) == 0.0 for task in tasks)
    kept = sorted(ranked[: max(num_inside, min(at_least, len(tasks)))])
    return [tasks[position] for position in kept]


class Schedule:
    """A stream of tasks, epoch after epoch, cut into steps: no state but its arguments.

    Args:
        num_tasks: K.
        since: the step at which the stream begins (tasks chosen anew begin a new one).
        shuffled: each epoch in an order of its own, else as given.
    """

    def __init__(
        self, num_tasks: int, *, prompts_per_step: int, since: int, seed: int, shuffled: bool
    ) -> None:
        self.num_tasks, self.prompts_per_step, self.since = num_tasks, prompts_per_step, since
        self.seed, self.shuffled = seed, shuffled

    def positions(self, step: int) -> list[int]:
        """Positions of the tasks practised in ``step`` (from 0); a task may be there twice only
        where an epoch ends within the step, or is shorter than one."""
        first = (step - self.since) * self.prompts_per_step
        places = range(first, first + self.prompts_per_step)
        orders = {epoch: self._order(epoch) for epoch in {p // self.num_tasks for p in places}}
        return [orders[p // self.num_tasks][p % self.num_tasks] for p in places]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffled:
            return list(range(self.num_tasks))
        seed = derived_seed(self.seed, "order", self.since, epoch)
        order: list[int] = np.random.default_rng(seed).permutation(self.num_tasks).tolist()
        return order


def steps_of_epochs(num_tasks: int, epochs: int, prompts_per_step: int) -> int:
    """Steps in which every task is practised ``epochs`` times, up to a remainder."""
    return max(1, num_tasks * epochs // prompts_per_step)
