"""Learning per query: full fine-tuning, LoRA, fast weights, in-context, as episodes that undo themselves."""

from ttt_adapt.adaptation.adapter import Adapter, Episode, Point, create_adapter
from ttt_adapt.adaptation.fast_weights import Reading, ReadingModel, load_state, save_state
from ttt_adapt.adaptation.optimizer import default_learning_rate
from ttt_adapt.adaptation.ordering import listing_order, training_order

__all__ = [
    "Adapter",
    "Episode",
    "Point",
    "Reading",
    "ReadingModel",
    "create_adapter",
    "default_learning_rate",
    "listing_order",
    "load_state",
    "save_state",
    "training_order",
]
