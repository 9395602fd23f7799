"""Full fine-tuning on a working copy: the base weights' memory is never written to."""

from collections.abc import Sequence

import torch
from torch import nn

from ttt_adapt.adaptation.plastic import BufferGuard, require_learnable
from ttt_adapt.adaptation.working_copy import WorkingCopy


class FullWeights:
    """Every weight of ``model`` that requires a gradient.

    Attaching points the model's parameters at a working copy, detaching points them back at their
    own memory: restoration copies nothing and cannot be inexact, and a ``state_dict`` taken before
    stays the base model's. Tied weights are one parameter and stay tied. A bfloat16 model learns
    in float32 masters, rounded to bfloat16 after each step.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        require_learnable(parameters, name)
        self._working = WorkingCopy(parameters)
        self._buffers = BufferGuard(model)
        self._parameters = parameters
        self._base: list[torch.Tensor] | None = None
        self.leaves: Sequence[torch.Tensor] = parameters
        self.masters: Sequence[torch.Tensor] = self._working.views
        self._shown = [
            view if p.dtype == view.dtype else torch.empty_like(p)
            for p, view in zip(parameters, self.masters, strict=True)
        ]
        self._rounded = [s for s, v in zip(self._shown, self.masters, strict=True) if s is not v]
        self._exact = [v for s, v in zip(self._shown, self.masters, strict=True) if s is not v]

    def reset(self, seed: int) -> None:
        self._working.load(self._base or [p.data for p in self._parameters])
        self.publish()

    def attach(self) -> None:
        if self._base is not None:
            return
        self._base = [p.data for p in self._parameters]
        for parameter, tensor in zip(self._parameters, self._shown, strict=True):
            parameter.data = tensor

    def detach(self) -> None:
        if self._base is None:
            return
        for parameter, tensor in zip(self._parameters, self._base, strict=True):
            parameter.data = tensor
        self._buffers.restore()
        # Last, so that an interrupted detach is finished by the next one.
        self._base = None

    def publish(self) -> None:
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._exact)

    def keep(self) -> None:
        self._working.keep()

    def is_finite(self) -> bool:
        return self._working.is_finite()

    def roll_back(self) -> None:
        self._working.roll_back()
        self.publish()

    def close(self) -> None:
        self.detach()
