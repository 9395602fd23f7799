"""Causal inner loops: mini-batches of tokens in their order; online, where each token is one.

Token i of a mini-batch that starts with weights W is answered by ``W − Σ_(j≤i) s_j ∂ℓ_j/∂W``, all
gradients at W; the last token's weights start the next mini-batch (Vision-TTT, algorithm 1). Where the
problem is the one of TTT layers, the TTT operators of ``ttt_adapt.kernels`` compute it; others in the
dual form here, one mini-batch after the other.

Shape legend: B images, N heads, T tokens, n tokens of a mini-batch, d head width.
"""

from typing import Any

import torch

from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.kernels.ttt_mlp import ttt_mlp
from ttt_adapt.vision.inner_loop.descent import Examples
from ttt_adapt.vision.inner_loop.learners import Layers, Learner, Slot, descend, gradients
from ttt_adapt.vision.inner_loop.reconstruction import Reconstruction


def fits_operator(layers: Layers, problem: Reconstruction) -> bool:
    """Whether the TTT operators compute this problem: ``f(x) = x + LN(learner(x))``, with biases,
    values as targets."""
    biased = all(layer.bias is not None for layer in layers)
    return biased and problem.residual and problem.feature_norm is not None and not problem.decoder


def by_operator(
    learner: Learner,
    layers: Layers,
    queries_BNTd: torch.Tensor,
    examples: Examples,
    problem: Reconstruction,
    size: int,
    rate: float,
) -> torch.Tensor:
    """The TTT operator's answers ``[B, N, T, d]``; layers ``[N, ...]``."""
    assert problem.feature_norm is not None, "see fits_operator"
    keys, targets, rates = examples
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries_BNTd, keys, targets))
    lr = k.new_full(k.shape[:3], rate) if rates is None else rate * rates.transpose(1, 2)
    weights = [tensor for layer in layers for tensor in layer if tensor is not None]
    names = ("weight", "bias") if learner.name == "linear" else ("w1", "b1", "w2", "b2")
    operator: Any = ttt_linear if learner.name == "linear" else ttt_mlp
    out: torch.Tensor
    out, _ = operator(
        q,
        k,
        v,
        lr,
        **dict(zip(names, weights, strict=True)),
        token_scale=k.new_ones(size),
        ln_weight=problem.feature_norm.weight,
        ln_bias=problem.feature_norm.bias,
        mini_batch_size=size,
        check_finite=False,
    )
    return out.transpose(1, 2)


def in_order(
    learner: Learner,
    layers: Layers,
    queries_BNTd: torch.Tensor | None,
    examples: Examples,
    problem: Reconstruction,
    size: int,
    rate: float,
    losses: list[torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """The dual form, one mini-batch after the other: answers ``[B, N, T, d]``.

    Args:
        queries_BNTd: ``None``: learn only.
        losses: where each token's loss goes, before its mini-batch's step, ``[B, N, n]`` each.
    """
    answers: list[torch.Tensor] = []
    num_tokens = examples.keys.shape[2]
    for first in range(0, num_tokens, size):
        part = slice(first, first + size)
        keys, targets = examples.keys[:, :, part], examples.targets[:, :, part]
        out, saved = learner.forward(layers, keys)
        if losses is not None:
            losses.append(problem.losses(keys, out, targets))
        d_out = rate * problem.gradient(keys, out, targets)
        if examples.rates is not None:
            d_out = d_out * examples.rates[:, :, part, None]
        slots: tuple[Slot, ...] = learner.slots(layers, saved, d_out)
        if queries_BNTd is not None:
            queries = queries_BNTd[:, :, part]
            count = keys.shape[2]
            visible = torch.ones(count, count, dtype=keys.dtype, device=keys.device).tril()
            answer = learner.dual(layers, slots, visible, queries)
            answers.append(problem.features(queries, answer))
        if first + size < num_tokens:
            layers = descend(layers, gradients(layers, slots), 1.0)
    return torch.cat(answers, dim=2) if answers else None
