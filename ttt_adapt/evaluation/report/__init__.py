"""Runs compared for people: one self-contained HTML page, and a PNG of each figure."""

from ttt_adapt.evaluation.report.writing import write_report

__all__ = ["write_report"]
