"""The dual form, one mini-batch after the other, in PyTorch."""

import torch

from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import LinearModel, Shared, Tensors, Tokens


def core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    """The core contract of :mod:`ttt_adapt.kernels.inner_loop.operator`."""
    return run_mini_batches(LinearModel(), tokens, shared, weights, lengths, causal)
