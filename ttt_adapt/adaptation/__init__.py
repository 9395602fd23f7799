"""Learning per query: full fine-tuning, LoRA, in-context and none, as episodes that undo themselves."""

from ttt_adapt.adaptation.adapter import Adapter, Episode, Point, create_adapter
from ttt_adapt.adaptation.optimizer import default_learning_rate
from ttt_adapt.adaptation.ordering import training_order

__all__ = [
    "Adapter",
    "Episode",
    "Point",
    "create_adapter",
    "default_learning_rate",
    "training_order",
]
