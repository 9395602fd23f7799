"""Gradient descent on an image's tokens: all of them T times, or T random mini-batches once.

MTTT, equation 2 and section 5 ("Inner-loop optimization"). Every token is then answered by the last
weights, so the order of the tokens does not matter.

Shape legend: B images, N heads, T tokens, n tokens of a mini-batch, d head width, E width of the
target.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from ttt_adapt.vision.inner_loop.learners import Layer, Layers, Learner, descend, gradients
from ttt_adapt.vision.inner_loop.reconstruction import Reconstruction

LARGEST_BLOCK = 1 << 24
"""Numbers in the largest tensor of a step; more tokens are taken in blocks, which the outer loop's
backward computes again."""


class Examples(NamedTuple):
    """``keys [B, N, n, d]``, ``targets [B, N or 1, n, E]``, ``rates [B, N, n]`` or ``None`` for ones."""

    keys: torch.Tensor
    targets: torch.Tensor
    rates: torch.Tensor | None

    def pick(self, order_Nn: torch.Tensor) -> "Examples":
        """Each head's own tokens."""
        batch, heads = self.keys.shape[:2]
        targets = self.targets.expand(batch, heads, *self.targets.shape[2:])

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            index = order_Nn[None, :, :, None].expand(batch, -1, -1, tensor.shape[3])
            return tensor.gather(2, index)

        rates = None if self.rates is None else gather(self.rates[..., None])[..., 0]
        return Examples(gather(self.keys), gather(targets), rates)

    def blocks(self) -> Iterator["Examples"]:
        """Blocks of tokens that keep a step's tensors below :data:`LARGEST_BLOCK` numbers."""
        batch, heads, num_tokens, width = self.keys.shape
        widest = batch * heads * max(4 * width, self.targets.shape[-1])
        size = max(1, LARGEST_BLOCK // widest)
        if size >= num_tokens:
            yield self
            return
        for first in range(0, num_tokens, size):
            part = slice(first, first + size)
            yield Examples(
                self.keys[:, :, part],
                self.targets[:, :, part],
                None if self.rates is None else self.rates[:, :, part],
            )


def step(
    learner: Learner, layers: Layers, examples: Examples, problem: Reconstruction, rate: float
) -> Layers:
    """One step of gradient descent on the summed loss of ``examples``."""
    blocks = list(examples.blocks())
    if len(blocks) == 1:
        return descend(layers, _block_gradients(learner, layers, blocks[0], problem), rate)
    found: Layers = ()
    for block in blocks:
        part = (
            checkpoint(_block_gradients, learner, layers, block, problem, use_reentrant=False)
            if torch.is_grad_enabled()
            else _block_gradients(learner, layers, block, problem)
        )
        found = part if not found else tuple(map(_add, found, part))
    return descend(layers, found, rate)


def mean_loss(
    learner: Learner, layers: Layers, examples: Examples, problem: Reconstruction
) -> torch.Tensor:
    """½‖·‖² averaged over tokens, ``[B, N]``."""
    total = sum(
        problem.losses(block.keys, learner(layers, block.keys), block.targets).sum(-1)
        for block in examples.blocks()
    )
    assert isinstance(total, torch.Tensor)
    return total / examples.keys.shape[2]


def partition(
    num_tokens: int,
    num_heads: int,
    num_batches: int,
    generator: torch.Generator | None,
    device: torch.device,
) -> Sequence[torch.Tensor]:
    """T random mini-batches of the tokens for each head, indices ``[N, n]``; sizes differ by one at
    most. The same order for every image, as in the public JAX code.

    Args:
        generator: on the CPU, whatever the device, so that orders are the same everywhere; ``None``:
            torch's own.
    """
    noise_NT = torch.rand(num_heads, num_tokens, generator=generator)
    order_NT = noise_NT.argsort(dim=-1, stable=True).to(device)
    return order_NT.tensor_split(num_batches, dim=1)


def _block_gradients(
    learner: Learner, layers: Layers, block: Examples, problem: Reconstruction
) -> Layers:
    out, saved = learner.forward(layers, block.keys)
    d_out = problem.gradient(block.keys, out, block.targets)
    if block.rates is not None:
        d_out = d_out * block.rates[..., None]
    return gradients(layers, learner.slots(layers, saved, d_out))


def _add(one: Layer, other: Layer) -> Layer:
    bias = None if one.bias is None or other.bias is None else one.bias + other.bias
    return Layer(one.weight + other.weight, bias)
