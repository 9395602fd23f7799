"""The inner models: what they answer, and what each token would write into them.

A step of gradient descent on a matrix is a sum of outer products, ``W ← W + Σ_j a_jᵀ u_j``: token j's
*key* ``a_j`` is that layer's input, its *value* ``u_j`` the gradient at the layer's output times −lr.

Shape legend: B rows, H heads, n tokens, D head width, F hidden width.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ttt_adapt.kernels.fast_weights.learner import InnerLearner, Tensors, Tokens

Write = tuple[torch.Tensor, torch.Tensor]
"""Keys ``[B, H, n, in]`` and values ``[B, H, n, out]``."""


@dataclass(frozen=True, slots=True, eq=False)
class DependentWrite:
    """Writes whose values depend on the weights: ``u = offset − reads W``; all ``[B, H, n, ...]``."""

    keys: torch.Tensor
    reads: torch.Tensor
    offset: torch.Tensor

    def at(self, weight: torch.Tensor) -> Write:
        return self.keys, self.offset - self.reads @ weight


def apply(learner: InnerLearner, weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    """``f(x)``, ``[B, H, n, D]``."""
    if learner.model == "linear":
        return x @ weights[0]
    w1, w2, w3 = weights
    return (functional.silu(x @ w1) * (x @ w3)) @ w2


def writes(learner: InnerLearner, weights: Tensors, tokens: Tokens) -> list[list[Write]]:
    """What tokens ``[B, H, n, ...]`` write into each matrix, with gradients at ``weights``."""
    if learner.model == "linear":
        known, dependent = linear_writes(learner, tokens)
        return [known + [write.at(weights[0]) for write in dependent]]
    return [[write] for write in _swiglu_writes(learner, weights, tokens)]


def linear_writes(
    learner: InnerLearner, tokens: Tokens
) -> tuple[list[Write], list[DependentWrite]]:
    """The linear model's writes: those known beforehand, and those that depend on the weights."""
    k, lr = tokens.k, tokens.lr
    if learner.loss == "l2":
        return [], [DependentWrite(k, lr * k, lr * tokens.v)]
    known = [(k, lr * tokens.v)]
    if tokens.removal_key is None or tokens.removal_strength is None:
        return known, []
    removal = tokens.removal_key
    removed = DependentWrite(tokens.removal_strength * removal, removal, torch.zeros_like(tokens.v))
    return known, [removed]


def _swiglu_writes(learner: InnerLearner, weights: Tensors, tokens: Tokens) -> list[Write]:
    w1, w2, w3 = weights
    k, v = tokens.k, tokens.v
    lr1, lr2, lr3 = torch.split(tokens.lr, 1, dim=-1)
    gate, linear = k @ w1, k @ w3
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    hidden = silu * linear
    # Minus the loss's gradient at the output, then at the hidden layer.
    towards = v - hidden @ w2 if learner.loss == "l2" else v
    back = towards @ w2.transpose(-1, -2)
    slope = sigmoid + silu * (1 - sigmoid)
    return [
        (k, back * linear * slope * lr1),
        (hidden, towards * lr2),
        (k, back * silu * lr3),
    ]
