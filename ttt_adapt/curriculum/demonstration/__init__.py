"""The demonstration of curricula: twelve string families, and a model of characters that can do
what they ask but usually does not. It learns on two processors in minutes.

Names load on first use: the families need no torch.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".characters": ("character_model", "character_tokenizer"),
        ".families": ("FAMILIES", "HELD_BACK", "draw_tasks", "string_task"),
        ".pretraining": ("HabitSettings", "habit", "pretrain"),
        ".running": (
            "Demonstration",
            "DemonstrationSettings",
            "plan_demonstration",
            "run_demonstration",
        ),
        ".scenarios": ("Scenario", "scenario"),
    },
)
