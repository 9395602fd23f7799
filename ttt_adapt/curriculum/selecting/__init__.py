"""Choosing what to practise: the tasks of a corpus that are similar to some targets, and diverse.

Names load on first use.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".band": ("Reselection",),
        ".choosing": ("select_curriculum",),
        ".curricula": ("Curriculum", "read_curriculum", "write_curriculum"),
        ".embedders": ("EncoderOfTasks", "PolicyEmbedder", "TaskEmbedder", "load_task_embedder"),
        ".embedding": ("embed_tasks",),
        ".noise": ("NoiseSuggestion", "suggested_noise_var"),
        ".report": ("SelectionReport", "TargetCoverage"),
        ".settings": ("CurriculumSelectionSettings",),
    },
)
