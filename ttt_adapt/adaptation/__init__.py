"""Learning per query: full fine-tuning, LoRA, in-context and none, as episodes that undo themselves."""

from ttt_adapt.adaptation.adapter import Adapter, Episode, Point, create_adapter
from ttt_adapt.adaptation.ordering import training_order

__all__ = ["Adapter", "Episode", "Point", "create_adapter", "training_order"]
