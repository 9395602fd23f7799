"""Curricula compared: all arms under all seeds at the same number of rollouts.

Names load on first use.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.curriculum.comparing.arms import Arm, Job, parse_arm
    from ttt_adapt.curriculum.comparing.comparing import (
        ComparisonProgress,
        compare_curricula,
        finished_comparison,
    )
    from ttt_adapt.curriculum.comparing.comparison import (
        ArmSummary,
        Choice,
        Comparison,
        Difference,
    )
    from ttt_adapt.curriculum.comparing.files import is_comparison, read_comparison
    from ttt_adapt.curriculum.comparing.page import write_comparison_report
    from ttt_adapt.curriculum.comparing.planning import ComparisonPlan, plan_comparison
    from ttt_adapt.curriculum.comparing.results import ArmRun, RunCost
    from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
    from ttt_adapt.curriculum.comparing.wording import comparison_as_markdown, conclusions

__all__ = [
    "Arm",
    "ArmRun",
    "ArmSummary",
    "Choice",
    "Comparison",
    "ComparisonPlan",
    "ComparisonProgress",
    "ComparisonSettings",
    "Difference",
    "Job",
    "RunCost",
    "compare_curricula",
    "comparison_as_markdown",
    "conclusions",
    "finished_comparison",
    "is_comparison",
    "parse_arm",
    "plan_comparison",
    "read_comparison",
    "write_comparison_report",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".arms": ("Arm", "Job", "parse_arm"),
        ".comparing": ("ComparisonProgress", "compare_curricula", "finished_comparison"),
        ".comparison": ("ArmSummary", "Choice", "Comparison", "Difference"),
        ".files": ("is_comparison", "read_comparison"),
        ".page": ("write_comparison_report",),
        ".planning": ("ComparisonPlan", "plan_comparison"),
        ".results": ("ArmRun", "RunCost"),
        ".settings": ("ComparisonSettings",),
        ".wording": ("comparison_as_markdown", "conclusions"),
    },
)
