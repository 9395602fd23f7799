"""Fast weights between calls: what a sequence of any length leaves behind.

Shape legend: B rows, H heads, b tokens in a mini-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from ttt_adapt.kernels.inner_loop.carried import CarriedState


@dataclass(frozen=True, slots=True, eq=False)
class FastWeightState(CarriedState):
    """Weights at the start of the open mini-batch, and that mini-batch's tokens so far.

    Keeping the open tokens' inputs and learning-rate-weighted gradients instead of accumulated
    gradients makes the state of TTT-MLP 2.5 times smaller to read per decoded token, and lets a
    sequence go on at any offset.

    Attributes:
        weights: the inner model's parameters, float32 (float64 for float64 inputs) ``[B, H, ...]``;
            for TTT-Linear ``(weight [B, H, D, D], bias [B, H, D])``, for TTT-MLP
            ``(w1 [B, H, D, F], b1 [B, H, F], w2 [B, H, F, D], b2 [B, H, D])``.
        slots: for each layer of the inner model its inputs and its weighted gradients
            ``lr_j · ∂ℓ_j/∂z_j``, ``[B, H, b, width]``; zero from ``num_open`` on. TTT-Linear:
            ``(k, g)``; TTT-MLP: ``(k, g1, x2, g2)``.
        num_open: int64 ``[B]``, tokens in the open mini-batch, at most b − 1.
    """

    weights: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    num_open: torch.Tensor

    @property
    def num_rows(self) -> int:
        return int(self.num_open.shape[0])

    @property
    def mini_batch_size(self) -> int:
        return int(self.slots[0].shape[2])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The state with every tensor changed."""
        return replace(
            self,
            weights=tuple(change(tensor) for tensor in self.weights),
            slots=tuple(change(tensor) for tensor in self.slots),
            num_open=change(self.num_open),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors, as safetensors wants them; :meth:`from_tensors` is the way back."""
        named = {f"weights.{i}": tensor for i, tensor in enumerate(self.weights)}
        named |= {f"slots.{i}": tensor for i, tensor in enumerate(self.slots)}
        return {**named, "num_open": self.num_open}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Self:
        """The state that :meth:`tensors` described."""

        def group(name: str) -> tuple[torch.Tensor, ...]:
            count = sum(key.startswith(f"{name}.") for key in tensors)
            return tuple(tensors[f"{name}.{i}"] for i in range(count))

        return cls(group("weights"), group("slots"), tensors["num_open"])
