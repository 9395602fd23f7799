"""Curricula: tasks whose answers can be verified, and what a completion of one is worth.

Names load on first use, so that reading tasks starts no process and loads no torch.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".comparing.comparing": ("compare_curricula",),
        ".comparing.comparison": ("Comparison",),
        ".comparing.settings": ("ComparisonSettings",),
        ".decontamination": ("Decontamination", "decontaminate"),
        ".duplicates": ("Deduplication", "deduplicate"),
        ".importers.importing": ("import_tasks",),
        ".sampling": ("Completion", "SolvedTask", "sample_attempts"),
        ".sampling_settings": ("SamplingSettings",),
        ".sandbox.running": ("Execution", "Sandbox"),
        ".sandbox.strength": ("Strength",),
        ".selecting.choosing": ("select_curriculum",),
        ".selecting.curricula": ("Curriculum", "read_curriculum", "write_curriculum"),
        ".selecting.embedding": ("embed_tasks",),
        ".selecting.settings": ("CurriculumSelectionSettings",),
        ".settings": (
            "DecontaminationSettings",
            "SandboxSettings",
            "TaskSourceSettings",
            "VerifierSettings",
        ),
        ".task_files": ("read_tasks", "write_tasks"),
        ".tasks": ("CallTest", "CheckTest", "CodeTests", "StdinTest", "Task"),
        ".training.session": ("TrainingResult", "train_curriculum"),
        ".training.settings": ("GRPOSettings",),
        ".verdicts": ("TestOutcome", "Verdict"),
        ".verifying": ("Verifier", "verify"),
        "ttt_adapt.evaluation.solving": ("pass_at_k",),
    },
)
