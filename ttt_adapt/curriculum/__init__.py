"""Curricula: tasks whose answers can be verified, and what a completion of one is worth.

Names load on first use, so that reading tasks starts no process and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.curriculum.comparing.comparing import compare_curricula
    from ttt_adapt.curriculum.comparing.comparison import Comparison
    from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
    from ttt_adapt.curriculum.decontamination import Decontamination, decontaminate
    from ttt_adapt.curriculum.duplicates import Deduplication, deduplicate
    from ttt_adapt.curriculum.importers.importing import import_tasks
    from ttt_adapt.curriculum.sampling import Completion, SolvedTask, sample_attempts
    from ttt_adapt.curriculum.sampling_settings import SamplingSettings
    from ttt_adapt.curriculum.sandbox.running import Execution, Sandbox
    from ttt_adapt.curriculum.sandbox.strength import Strength
    from ttt_adapt.curriculum.selecting.choosing import select_curriculum
    from ttt_adapt.curriculum.selecting.curricula import (
        Curriculum,
        read_curriculum,
        write_curriculum,
    )
    from ttt_adapt.curriculum.selecting.embedding import embed_tasks
    from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
    from ttt_adapt.curriculum.settings import (
        DecontaminationSettings,
        SandboxSettings,
        TaskSourceSettings,
        VerifierSettings,
    )
    from ttt_adapt.curriculum.task_files import read_tasks, write_tasks
    from ttt_adapt.curriculum.tasks import CallTest, CheckTest, CodeTests, StdinTest, Task
    from ttt_adapt.curriculum.training.session import TrainingResult, train_curriculum
    from ttt_adapt.curriculum.training.settings import GRPOSettings
    from ttt_adapt.curriculum.verdicts import TestOutcome, Verdict
    from ttt_adapt.curriculum.verifying import Verifier, verify
    from ttt_adapt.evaluation.solving import pass_at_k

_MODULES = {
    "ttt_adapt.curriculum.comparing.comparing": ("compare_curricula",),
    "ttt_adapt.curriculum.comparing.comparison": ("Comparison",),
    "ttt_adapt.curriculum.comparing.settings": ("ComparisonSettings",),
    "ttt_adapt.curriculum.decontamination": ("Decontamination", "decontaminate"),
    "ttt_adapt.curriculum.duplicates": ("Deduplication", "deduplicate"),
    "ttt_adapt.curriculum.importers.importing": ("import_tasks",),
    "ttt_adapt.curriculum.sandbox.running": ("Execution", "Sandbox"),
    "ttt_adapt.curriculum.sandbox.strength": ("Strength",),
    "ttt_adapt.curriculum.selecting.choosing": ("select_curriculum",),
    "ttt_adapt.curriculum.selecting.curricula": (
        "Curriculum",
        "read_curriculum",
        "write_curriculum",
    ),
    "ttt_adapt.curriculum.selecting.embedding": ("embed_tasks",),
    "ttt_adapt.curriculum.selecting.settings": ("CurriculumSelectionSettings",),
    "ttt_adapt.curriculum.sampling": ("Completion", "SolvedTask", "sample_attempts"),
    "ttt_adapt.curriculum.sampling_settings": ("SamplingSettings",),
    "ttt_adapt.curriculum.settings": (
        "DecontaminationSettings",
        "SandboxSettings",
        "TaskSourceSettings",
        "VerifierSettings",
    ),
    "ttt_adapt.curriculum.task_files": ("read_tasks", "write_tasks"),
    "ttt_adapt.curriculum.tasks": ("CallTest", "CheckTest", "CodeTests", "StdinTest", "Task"),
    "ttt_adapt.curriculum.training.session": ("TrainingResult", "train_curriculum"),
    "ttt_adapt.curriculum.training.settings": ("GRPOSettings",),
    "ttt_adapt.curriculum.verdicts": ("TestOutcome", "Verdict"),
    "ttt_adapt.curriculum.verifying": ("Verifier", "verify"),
    "ttt_adapt.evaluation.solving": ("pass_at_k",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CallTest",
    "CheckTest",
    "CodeTests",
    "Comparison",
    "ComparisonSettings",
    "Completion",
    "Curriculum",
    "CurriculumSelectionSettings",
    "Decontamination",
    "DecontaminationSettings",
    "Deduplication",
    "Execution",
    "GRPOSettings",
    "SamplingSettings",
    "Sandbox",
    "SandboxSettings",
    "SolvedTask",
    "StdinTest",
    "Strength",
    "Task",
    "TaskSourceSettings",
    "TestOutcome",
    "TrainingResult",
    "Verdict",
    "Verifier",
    "VerifierSettings",
    "compare_curricula",
    "decontaminate",
    "deduplicate",
    "embed_tasks",
    "import_tasks",
    "pass_at_k",
    "read_curriculum",
    "read_tasks",
    "sample_attempts",
    "select_curriculum",
    "train_curriculum",
    "verify",
    "write_curriculum",
    "write_tasks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
