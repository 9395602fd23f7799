"""What every state that goes from call to call can do, whatever tensors it is made of."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch


class CarriedState(ABC):
    """Tensors whose first axis is the rows of a batch."""

    __slots__ = ()

    @abstractmethod
    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The state with every tensor changed."""

    def select(self, rows: torch.Tensor) -> Self:
        """The state of these rows, in this order; a row may be taken many times (beam search, or one
        state for many queries)."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> Self:
        return self.map(torch.Tensor.detach)

    def clone(self) -> Self:
        return self.map(torch.Tensor.clone)

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device))
