"""Reinforcement learning at the smallest size: tasks, a reward that differs, a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ttt_adapt.curriculum import GRPOSettings, Task, TrainingResult, Verifier, train_curriculum
from ttt_adapt.curriculum.training import Reselect, TrainingProgress

Reward = Callable[[Task, str], float | None]


def tiny_practice(**changes: Any) -> GRPOSettings:
    """Two steps of three prompts with four completions of five tokens each.

    Args:
        changes: settings in the place of these.
    """
    values: dict[str, Any] = {
        "num_steps": 2,
        "prompts_per_step": 3,
        "num_generations": 4,
        "learning_rate": 1e-2,
        "max_completion_tokens": 5,
        "max_prompt_tokens": 40,
        "device": "cpu",
        **changes,
    }
    return GRPOSettings(**values)


def own_tasks(num: int = 6) -> list[Task]:
    """Tasks of the kind ``own``, each with a longer prompt than the one before."""
    return [Task(id=f"t{n}", kind="own", prompt="say " + "ab" * n) for n in range(num)]


def share_of_letters(task: Task, completion: str) -> float:
    """Share of a completion of five tokens that is lower-case letters: within a group it differs."""
    return sum("a" <= letter <= "z" for letter in completion) / 5


def practise(
    model: Path,
    out: Path,
    tasks: Sequence[Task] | None = None,
    *,
    reward: Reward = share_of_letters,
    progress: Callable[[TrainingProgress], None] | None = None,
    reselect: Reselect | None = None,
    **changes: Any,
) -> TrainingResult:
    """Train the model in a folder with ``reward`` for the kind ``own``.

    Args:
        changes: of :func:`tiny_practice`.
    """
    with Verifier(callables={"own": reward}) as verifier:
        return train_curriculum(
            model,
            own_tasks() if tasks is None else tasks,
            tiny_practice(**changes),
            out,
            verifier=verifier,
            progress=progress,
            reselect=reselect,
        )
