"""Verifying completions: mathematics, choices, exact and regular answers, grids, programs."""

from ttt_adapt.curriculum.verifiers.extraction import FinalAnswer, final_answer, last_boxed

__all__ = ["FinalAnswer", "final_answer", "last_boxed"]
