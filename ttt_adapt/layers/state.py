"""What a TTT layer leaves behind between calls: fast weights, and the inputs its convolutions reach.

Shape legend: B rows, C width, K taps of a short convolution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.carried import CarriedState


@dataclass(frozen=True, slots=True, eq=False)
class TTTState(CarriedState):
    """The state of one TTT layer after some tokens; each row may be at another offset.

    Attributes:
        fast: the fast weights, float32, and the tokens of the open mini-batch.
        tail: ``[B, K - 1, C]`` the last inputs of the short convolutions, zero where a row has had
            fewer; ``None`` in layers that have none.
    """

    fast: FastWeightState
    tail: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.fast.num_rows

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The state with every tensor changed."""
        tail = None if self.tail is None else change(self.tail)
        return replace(self, fast=self.fast.map(change), tail=tail)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors, as safetensors wants them; :meth:`from_tensors` is the way back."""
        found = {f"fast.{name}": tensor for name, tensor in self.fast.tensors().items()}
        return found if self.tail is None else {**found, "tail": self.tail}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Self:
        """The state that :meth:`tensors` described."""
        fast = {k.removeprefix("fast."): v for k, v in tensors.items() if k.startswith("fast.")}
        return cls(FastWeightState.from_tensors(fast), tensors.get("tail"))
