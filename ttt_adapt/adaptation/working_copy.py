"""The weights that learning writes to: float32, in one flat buffer, with the last good state."""

from collections.abc import Sequence

import torch


class WorkingCopy:
    """Float32 tensors of given shapes that share one flat buffer, so that keeping the last good
    state and going back to it are each one copy at memory bandwidth.

    Attributes:
        views: one tensor for each of the given ones, same shape, in the flat buffer.
    """

    # Views start at multiples of 64 bytes: a cache line, and what vector units like.
    _ALIGNMENT = 16

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        starts = [0]
        for tensor in like:
            size = -(-tensor.numel() // self._ALIGNMENT) * self._ALIGNMENT
            starts.append(starts[-1] + size)
        self._flat = torch.zeros(starts[-1], dtype=torch.float32, device=like[0].device)
        self._good = torch.zeros_like(self._flat)
        self.views = [
            self._flat[start : start + tensor.numel()].view(tensor.shape)
            for start, tensor in zip(starts, like, strict=False)
        ]

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Set every view from ``values`` (other float dtypes are converted)."""
        torch._foreach_copy_(self.views, list(values))

    def is_finite(self) -> bool:
        """Whether the weights' norm has a float32 value."""
        return bool(torch.isfinite(torch.linalg.vector_norm(self._flat)))

    def keep(self) -> None:
        """Remember the present state as the last good one."""
        self._good.copy_(self._flat)

    def roll_back(self) -> None:
        """Go back to the state of the last :meth:`keep`."""
        self._flat.copy_(self._good)
