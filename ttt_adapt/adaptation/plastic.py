"""What every way of learning weights offers to an episode."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ttt_adapt.errors import ModelError


class PlasticWeights(Protocol):
    """Weights that can be laid over a model, learned, and taken away without a trace.

    Attributes:
        leaves: the model's tensors that gradients are taken with respect to.
        masters: the float32 tensors that the optimizer writes to, one for each leaf.
    """

    @property
    def leaves(self) -> Sequence[torch.Tensor]: ...
    @property
    def masters(self) -> Sequence[torch.Tensor]: ...

    def reset(self, seed: int) -> None:
        """Start afresh: the next query's first state."""

    def attach(self) -> None:
        """Let the model compute with these weights. Nothing happens if it already does."""

    def detach(self) -> None:
        """Give the model its own weights back, bit for bit. Safe to repeat or to finish later
        when interrupted."""

    def publish(self) -> None:
        """Bring the masters' new values to the model."""

    def keep(self) -> None:
        """Remember the present state as the last good one."""

    def is_finite(self) -> bool:
        """Whether the weights have a norm."""
        ...

    def roll_back(self) -> None:
        """Go back to the last good state."""

    def close(self) -> None:
        """Let go of everything that was created for learning."""


class BufferGuard:
    """Puts a model's buffers back: forward passes may write to them (rotary tables that grow)."""

    def __init__(self, model: nn.Module) -> None:
        self._entries = [
            (module._buffers, name, buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was replaced, and rewrite what was written to."""
        for position, (owner, name, buffer, content, version) in enumerate(self._entries):
            if buffer._version != version:
                buffer.copy_(content)
                self._entries[position] = (owner, name, buffer, content, buffer._version)
            owner[name] = buffer


def require_learnable(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Refuse weights that cannot be learned faithfully.

    Raises:
        ModelError: none at all, float16 (its range loses gradients), other types, several devices,
            or different parameters that share memory.
    """
    if not tensors:
        raise ModelError(f"{name}: no weight requires a gradient; set requires_grad and try again")
    dtypes = {tensor.dtype for tensor in tensors} - {torch.float32, torch.bfloat16}
    if dtypes:
        raise ModelError(
            f"{name}: expected weights in float32 or bfloat16 to learn, found "
            f"{', '.join(sorted(map(str, dtypes)))}; load the model with dtype = float32"
        )
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ModelError(
            f"{name}: expected weights on one device, found {', '.join(sorted(map(str, devices)))}"
        )
    if devices != {torch.device("meta")}:
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
            for tensor in tensors
            if tensor.numel()
        )
        if any(left[1] > right[0] for left, right in itertools.pairwise(spans)):
            raise ModelError(
                f"{name}: two parameters share memory and would drift apart; tie them by using "
                "one parameter (model.tie_weights())"
            )
