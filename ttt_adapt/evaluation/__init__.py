"""Measuring: bits per byte, protocols, the ledger of a run, and what a run found.

Names load on first use, so that reading results needs no torch.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.evaluation.bootstrap import PairedBootstrap, paired_bootstrap
    from ttt_adapt.evaluation.comparison import Comparison, ComparisonRow, compare
    from ttt_adapt.evaluation.ledger import Ledger
    from ttt_adapt.evaluation.pile import PILE_WEIGHTS, PileAverage, pile_average
    from ttt_adapt.evaluation.protocols import Query, choose_documents, cut, halve, make_query
    from ttt_adapt.evaluation.report import write_report
    from ttt_adapt.evaluation.scoring import (
        LossyTokenizerWarning,
        bits_per_byte,
        model_max_length,
        warn_if_lossy,
    )
    from ttt_adapt.evaluation.serialization import read_results, write_results
    from ttt_adapt.evaluation.solving import (
        Attempts,
        Estimate,
        SolveRates,
        majority_at_k,
        pass_at_k,
        solve_rate_difference,
        solve_rates,
    )
    from ttt_adapt.evaluation.summary import (
        Cost,
        Failure,
        StepSummary,
        Summary,
        read_summary,
        summarize,
    )
    from ttt_adapt.evaluation.windows import Window, make_windows

__all__ = [
    "PILE_WEIGHTS",
    "Attempts",
    "Comparison",
    "ComparisonRow",
    "Cost",
    "Estimate",
    "Failure",
    "Ledger",
    "LossyTokenizerWarning",
    "PairedBootstrap",
    "PileAverage",
    "Query",
    "SolveRates",
    "StepSummary",
    "Summary",
    "Window",
    "bits_per_byte",
    "choose_documents",
    "compare",
    "cut",
    "halve",
    "majority_at_k",
    "make_query",
    "make_windows",
    "model_max_length",
    "paired_bootstrap",
    "pass_at_k",
    "pile_average",
    "read_results",
    "read_summary",
    "solve_rate_difference",
    "solve_rates",
    "summarize",
    "warn_if_lossy",
    "write_report",
    "write_results",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".bootstrap": ("PairedBootstrap", "paired_bootstrap"),
        ".comparison": ("Comparison", "ComparisonRow", "compare"),
        ".ledger": ("Ledger",),
        ".pile": ("PILE_WEIGHTS", "PileAverage", "pile_average"),
        ".protocols": ("Query", "choose_documents", "cut", "halve", "make_query"),
        ".report": ("write_report",),
        ".scoring": ("LossyTokenizerWarning", "bits_per_byte", "model_max_length", "warn_if_lossy"),
        ".serialization": ("read_results", "write_results"),
        ".solving": (
            "Attempts",
            "Estimate",
            "SolveRates",
            "majority_at_k",
            "pass_at_k",
            "solve_rate_difference",
            "solve_rates",
        ),
        ".summary": ("Cost", "Failure", "StepSummary", "Summary", "read_summary", "summarize"),
        ".windows": ("Window", "make_windows"),
    },
)
