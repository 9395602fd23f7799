"""Multiply-adds of vision models: a formula for each module, held to torch's counter."""

from ttt_adapt.vision.costs.counting import (
    ModelCost,
    ModuleCost,
    cost_table,
    count_macs,
    count_macs_by_counter,
)
from ttt_adapt.vision.costs.formulas import register_macs

__all__ = [
    "ModelCost",
    "ModuleCost",
    "cost_table",
    "count_macs",
    "count_macs_by_counter",
    "register_macs",
]
