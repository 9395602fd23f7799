"""The few verbs: build an index, select what to learn from, predict one text, evaluate a set.

Each takes settings and returns frozen values; the command line is a thin skin over them.
"""

from ttt_adapt.pipeline.arms import Arm, make_arm
from ttt_adapt.pipeline.building import (
    add_documents,
    build_index,
    build_progress,
    open_index,
    plan_index,
)
from ttt_adapt.pipeline.evaluating import DEFAULT_ARMS, evaluate, plan_evaluation, read_items
from ttt_adapt.pipeline.predicting import Continuation, continue_prompt, predict
from ttt_adapt.pipeline.reading import (
    ReadState,
    continue_from_state,
    predict_from_state,
    read_state,
)
from ttt_adapt.pipeline.selecting import Picked, Query, Retrieved, pick, retrieve, select

__all__ = [
    "DEFAULT_ARMS",
    "Arm",
    "Continuation",
    "Picked",
    "Query",
    "ReadState",
    "Retrieved",
    "add_documents",
    "build_index",
    "build_progress",
    "continue_from_state",
    "continue_prompt",
    "evaluate",
    "make_arm",
    "open_index",
    "pick",
    "plan_evaluation",
    "plan_index",
    "predict",
    "predict_from_state",
    "read_items",
    "read_state",
    "retrieve",
    "select",
]
