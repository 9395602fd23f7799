"""The demonstration of curricula: twelve string families, and a model of characters that can do
what they ask but usually does not. It learns on two processors in minutes.

Names load on first use: the families need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.curriculum.demonstration.characters import (
        character_model,
        character_tokenizer,
    )
    from ttt_adapt.curriculum.demonstration.families import (
        FAMILIES,
        HELD_BACK,
        draw_tasks,
        string_task,
    )
    from ttt_adapt.curriculum.demonstration.pretraining import HabitSettings, habit, pretrain
    from ttt_adapt.curriculum.demonstration.running import (
        Demonstration,
        DemonstrationSettings,
        plan_demonstration,
        run_demonstration,
    )
    from ttt_adapt.curriculum.demonstration.scenarios import Scenario, scenario

_MODULES = {
    "characters": ("character_model", "character_tokenizer"),
    "families": ("FAMILIES", "HELD_BACK", "draw_tasks", "string_task"),
    "pretraining": ("HabitSettings", "habit", "pretrain"),
    "running": (
        "Demonstration",
        "DemonstrationSettings",
        "plan_demonstration",
        "run_demonstration",
    ),
    "scenarios": ("Scenario", "scenario"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "FAMILIES",
    "HELD_BACK",
    "Demonstration",
    "DemonstrationSettings",
    "HabitSettings",
    "Scenario",
    "character_model",
    "character_tokenizer",
    "draw_tasks",
    "habit",
    "plan_demonstration",
    "pretrain",
    "run_demonstration",
    "scenario",
    "string_task",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
