"""AdamW with decay where it belongs, and the running average of the weights."""

import copy

import torch
from torch import nn

from ttt_adapt.vision.training.settings import VisionTrainSettings


def build_optimizer(model: nn.Module, settings: VisionTrainSettings) -> torch.optim.AdamW:
    """AdamW over the weights that learn; two groups, the second without decay.

    Weights of one dimension (biases, norms) are not decayed, nor those that the model's
    ``no_weight_decay()`` names (positions, initial fast weights).
    """
    named = getattr(model, "no_weight_decay", None)
    kept = set(named()) if callable(named) else set()
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = parameter.ndim <= 1 or name in kept or name.rsplit(".", 1)[-1] in kept
            (undecayed if flat else decayed).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


class WeightAverage:
    """An exponential moving average of a model's weights, in a copy of it.

    Args:
        decay: share of the average that stays at each step; early on less, ``(1 + n) / (10 + n)``
            after ``n`` steps, so that the initial weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after outer step ``step`` (1-based)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        ours = [parameter.detach() for parameter in self.model.parameters()]
        theirs = [parameter.detach() for parameter in model.parameters()]
        torch._foreach_lerp_(ours, theirs, 1.0 - decay)
