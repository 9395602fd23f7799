"""Curricula: tasks whose answers can be verified, and what a completion of one is worth.

Names load on first use, so that reading tasks starts no process and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.curriculum.decontamination import Decontamination, decontaminate
    from ttt_adapt.curriculum.duplicates import Deduplication, deduplicate
    from ttt_adapt.curriculum.importers.importing import import_tasks
    from ttt_adapt.curriculum.sandbox.running import Execution, Sandbox
    from ttt_adapt.curriculum.sandbox.strength import Strength
    from ttt_adapt.curriculum.settings import (
        DecontaminationSettings,
        SandboxSettings,
        TaskSourceSettings,
        VerifierSettings,
    )
    from ttt_adapt.curriculum.task_files import read_tasks, write_tasks
    from ttt_adapt.curriculum.tasks import CallTest, CheckTest, CodeTests, StdinTest, Task
    from ttt_adapt.curriculum.verdicts import TestOutcome, Verdict
    from ttt_adapt.curriculum.verifying import Verifier, verify
    from ttt_adapt.evaluation.solving import pass_at_k

_MODULES = {
    "ttt_adapt.curriculum.decontamination": ("Decontamination", "decontaminate"),
    "ttt_adapt.curriculum.duplicates": ("Deduplication", "deduplicate"),
    "ttt_adapt.curriculum.importers.importing": ("import_tasks",),
    "ttt_adapt.curriculum.sandbox.running": ("Execution", "Sandbox"),
    "ttt_adapt.curriculum.sandbox.strength": ("Strength",),
    "ttt_adapt.curriculum.settings": (
        "DecontaminationSettings",
        "SandboxSettings",
        "TaskSourceSettings",
        "VerifierSettings",
    ),
    "ttt_adapt.curriculum.task_files": ("read_tasks", "write_tasks"),
    "ttt_adapt.curriculum.tasks": ("CallTest", "CheckTest", "CodeTests", "StdinTest", "Task"),
    "ttt_adapt.curriculum.verdicts": ("TestOutcome", "Verdict"),
    "ttt_adapt.curriculum.verifying": ("Verifier", "verify"),
    "ttt_adapt.evaluation.solving": ("pass_at_k",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CallTest",
    "CheckTest",
    "CodeTests",
    "Decontamination",
    "DecontaminationSettings",
    "Deduplication",
    "Execution",
    "Sandbox",
    "SandboxSettings",
    "StdinTest",
    "Strength",
    "Task",
    "TaskSourceSettings",
    "TestOutcome",
    "Verdict",
    "Verifier",
    "VerifierSettings",
    "decontaminate",
    "deduplicate",
    "import_tasks",
    "pass_at_k",
    "read_tasks",
    "verify",
    "write_tasks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
