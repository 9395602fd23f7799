"""What is asked for in the demonstration: targets, a corpus, and what is evaluated.

- ``single``: all targets are of one family.
- ``mixed``: three families, 48 : 12 : 4 of 64, so that a choice by the mean of all targets can lose
  the rare ones.

Targets, what is evaluated and what shows forgetting are different strings; the corpus holds none of
them, and none of two families that are held back altogether.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ttt_adapt.curriculum.decontamination import decontaminate
from ttt_adapt.curriculum.demonstration.families import FAMILIES, HELD_BACK, draw_tasks
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import SettingsError

SCENARIOS: Mapping[str, Mapping[str, int]] = {
    "single": {"rotl": 64},
    "mixed": {"rotl": 48, "sort": 12, "swap": 4},
}
"""Targets by family."""
TARGET_SHARE = 0.08
"""Of the corpus, for each family that some scenario asks for; the other families share the rest."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One question that the demonstration asks.

    Attributes:
        targets: what curricula are chosen for.
        evaluation: other strings of the targets' families, equally many of each.
        others: of every other family, held back ones too.
    """

    name: str
    corpus: tuple[Task, ...]
    targets: tuple[Task, ...]
    evaluation: tuple[Task, ...]
    others: tuple[Task, ...]


def scenario(
    name: str,
    *,
    seed: int = 0,
    num_corpus: int = 6000,
    num_evaluation: int = 96,
    num_other: int = 8,
) -> Scenario:
    """Draw the tasks of a scenario.

    Args:
        name: one of :data:`SCENARIOS`.
        num_corpus: tasks to choose from, before those that are evaluated are left out.
        num_evaluation: tasks, shared equally by the targets' families.
        num_other: of each other family.

    Raises:
        SettingsError: no such scenario.
    """
    if name not in SCENARIOS:
        raise SettingsError(f"scenario: expected {' or '.join(SCENARIOS)}, found {name!r}")
    targets_of = SCENARIOS[name]
    targets = draw_tasks(targets_of, seed)
    each = num_evaluation // len(targets_of)
    evaluation = draw_tasks(dict.fromkeys(targets_of, each), seed + 1, without=targets)
    rest = [family for family in FAMILIES if family not in targets_of]
    others = draw_tasks(dict.fromkeys(rest, num_other), seed + 2)
    corpus = draw_tasks(_corpus_counts(num_corpus), seed + 3)
    kept = decontaminate(corpus, [*targets, *evaluation, *others]).kept
    return Scenario(name, kept, tuple(targets), tuple(evaluation), tuple(others))


def evaluated_tasks(name: str, *, seed: int = 0) -> tuple[Task, ...]:
    """What a scenario evaluates, with its own numbers: nothing should be trained on these."""
    found = scenario(name, seed=seed, num_corpus=len(FAMILIES))
    return (*found.targets, *found.evaluation, *found.others)


def _corpus_counts(num_corpus: int) -> dict[str, int]:
    """Tasks of each family, in the families' order: what is drawn depends on it."""
    asked_for = {family for targets in SCENARIOS.values() for family in targets}
    each = max(1, round(TARGET_SHARE * num_corpus))
    num_rest = len(FAMILIES) - len(HELD_BACK) - len(asked_for)
    left = max(1, (num_corpus - each * len(asked_for)) // num_rest)
    return {
        family: each if family in asked_for else left
        for family in FAMILIES
        if family not in HELD_BACK
    }
