"""Tasks out of data sets: GSM8K, MATH, SVAMP, code, BIG-Bench-Hard, choices, grids, any table."""

from ttt_adapt.curriculum.importers.importing import import_tasks

__all__ = ["import_tasks"]
