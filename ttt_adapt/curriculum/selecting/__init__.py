"""Choosing what to practise: the tasks of a corpus that are similar to some targets, and diverse.

Names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.curriculum.selecting.band import Reselection
    from ttt_adapt.curriculum.selecting.choosing import select_curriculum
    from ttt_adapt.curriculum.selecting.curricula import (
        Curriculum,
        read_curriculum,
        write_curriculum,
    )
    from ttt_adapt.curriculum.selecting.embedders import (
        EncoderOfTasks,
        PolicyEmbedder,
        TaskEmbedder,
        load_task_embedder,
    )
    from ttt_adapt.curriculum.selecting.embedding import embed_tasks
    from ttt_adapt.curriculum.selecting.noise import NoiseSuggestion, suggested_noise_var
    from ttt_adapt.curriculum.selecting.report import SelectionReport, TargetCoverage
    from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings

_MODULES = {
    "band": ("Reselection",),
    "choosing": ("select_curriculum",),
    "curricula": ("Curriculum", "read_curriculum", "write_curriculum"),
    "embedders": ("EncoderOfTasks", "PolicyEmbedder", "TaskEmbedder", "load_task_embedder"),
    "embedding": ("embed_tasks",),
    "noise": ("NoiseSuggestion", "suggested_noise_var"),
    "report": ("SelectionReport", "TargetCoverage"),
    "settings": ("CurriculumSelectionSettings",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Curriculum",
    "CurriculumSelectionSettings",
    "EncoderOfTasks",
    "NoiseSuggestion",
    "PolicyEmbedder",
    "Reselection",
    "SelectionReport",
    "TargetCoverage",
    "TaskEmbedder",
    "embed_tasks",
    "load_task_embedder",
    "read_curriculum",
    "select_curriculum",
    "suggested_noise_var",
    "write_curriculum",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
