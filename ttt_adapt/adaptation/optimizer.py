"""The optimizer over the float32 masters."""

from collections.abc import Sequence

import torch

from ttt_adapt.config import AdaptationSettings


def make_optimizer(
    masters: Sequence[torch.Tensor], settings: AdaptationSettings
) -> torch.optim.Optimizer:
    """Adam or AdamW as ``torch.optim`` has them, in the fused form: one pass over memory per
    step, about a third of the time of the default form on CPU, equal to it up to rounding.

    ``protocol="tttlm"`` always means AdamW (Adam is the same without weight decay).
    """
    tttlm = settings.protocol == "tttlm"
    kind = torch.optim.AdamW if tttlm or settings.optimizer == "adamw" else torch.optim.Adam
    return kind(
        list(masters),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
