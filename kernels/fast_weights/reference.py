"""The learner per token, by plain autograd: the equations of README.md, in any float dtype.

Used by tests and for diagnosis, far too slow else.

Shape legend: H heads, D head width, F hidden width.
"""

import torch
from torch.nn import functional

from ttt_adapt.kernels.fast_weights.learner import Carried, InnerLearner, Tensors, Tokens
from ttt_adapt.kernels.fast_weights.steps import orthogonalize, with_norms


def apply(learner: InnerLearner, weights: Tensors, x_HD: torch.Tensor) -> torch.Tensor:
    """``f(x)``, ``[H, D]``, of weights ``[H, ...]``."""
    if learner.model == "linear":
        return _product(x_HD, weights[0])
    w1, w2, w3 = weights
    return _product(functional.silu(_product(x_HD, w1)) * _product(x_HD, w3), w2)


def core(
    learner: InnerLearner,
    q: torch.Tensor,
    tokens: Tokens,
    token_scale: torch.Tensor | None,
    carried: Carried,
    mini_batch_size: int,
) -> tuple[torch.Tensor, Carried]:
    """The core contract (see ``learner.py``), one row after the other."""
    earlier = tokens.num_tokens - q.shape[1]
    padded = functional.pad(q, (0, 0, 0, 0, earlier, 0))
    every = (q, *tokens.named().values(), *carried.weights, *carried.momentum, *carried.norms)
    scale = () if token_scale is None else (token_scale,)
    learnable = torch.is_grad_enabled() and any(t.requires_grad for t in (*every, *scale))
    with torch.set_grad_enabled(learnable):
        rows = [
            _run_row(
                learner,
                padded[row],
                tokens.map(lambda tensor, row=row: tensor[row]),  # type: ignore[misc]
                token_scale,
                _map(carried, row),
                mini_batch_size,
            )
            for row in range(q.shape[0])
        ]
    out = torch.stack([out for out, _ in rows])[:, earlier:]
    groups = ((end.weights, end.momentum, end.norms) for _, end in rows)
    final = (
        tuple(map(torch.stack, zip(*group, strict=True))) for group in zip(*groups, strict=True)
    )
    return out, Carried(*final)


def _run_row(
    learner: InnerLearner,
    q: torch.Tensor,
    tokens: Tokens,
    token_scale: torch.Tensor | None,
    carried: Carried,
    size: int,
) -> tuple[torch.Tensor, Carried]:
    num_tokens, outputs = q.shape[0], []
    weights, momentum = carried.weights, carried.momentum
    for first in range(0, num_tokens, size):
        mini_batch = range(first, min(first + size, num_tokens))
        start, start_momentum = weights, momentum
        gradients = [_gradients(learner, start, tokens, token) for token in mini_batch]
        if learner.step == "token":
            for position, token in enumerate(mini_batch):
                before = weights
                weights, momentum = _token_step(
                    weights, momentum, gradients[position], tokens, token
                )
                if token_scale is not None:
                    learned = [
                        sum(g[m] for g in gradients[: position + 1]) for m in range(len(start))
                    ]
                    weights = tuple(
                        w - token_scale[position] * g for w, g in zip(start, learned, strict=True)
                    )
                read = weights if learner.order == "update-then-apply" else before
                outputs.append(apply(learner, read, q[token]))
        else:
            weights, momentum = _mini_batch_step(
                learner, carried.norms, start, momentum, gradients, tokens, mini_batch
            )
            read = weights if learner.order == "update-then-apply" else start
            outputs += [apply(learner, read, q[token]) for token in mini_batch]
        if len(mini_batch) < size and learner.causal:
            weights, momentum = start, start_momentum
    return torch.stack(outputs), Carried(weights, momentum, carried.norms)


def _gradients(learner: InnerLearner, start: Tensors, tokens: Tokens, token: int) -> Tensors:
    """``lr ∂ℓ/∂W`` for each matrix, and what is removed along a key of its own."""
    k, v, lr = tokens.k[token], tokens.v[token], tokens.lr[token]
    outer = torch.is_grad_enabled()
    removed: Tensors = ()
    with torch.enable_grad():
        at = tuple(w if w.requires_grad else w.detach().requires_grad_() for w in start)
        f = apply(learner, at, k)
        loss = 0.5 * (f - v).square().sum() if learner.loss == "l2" else -(f * v).sum()
        found = torch.autograd.grad(loss, at, create_graph=outer)
        if tokens.removal_key is not None:
            held = 0.5 * apply(learner, at, tokens.removal_key[token]).square().sum()
            removed = torch.autograd.grad(held, at, create_graph=outer)
    scaled = [g * lr[:, m, None, None] for m, g in enumerate(found)]
    if tokens.removal_strength is not None:
        scaled[0] = scaled[0] + tokens.removal_strength[token][..., None] * removed[0]
    return tuple(scaled)


def _token_step(
    weights: Tensors, momentum: Tensors, gradients: Tensors, tokens: Tokens, token: int
) -> tuple[Tensors, Tensors]:
    """``S_t = θ_t S − lr_t ∂ℓ_t``, ``W_t = decay_t W + S_t``."""
    steps = tuple(-g for g in gradients)
    if tokens.momentum is not None:
        theta = tokens.momentum[token][:, None, None]
        steps = tuple(theta * s + step for s, step in zip(momentum, steps, strict=True))
        momentum = steps
    if tokens.decay is not None:
        weights = tuple(_channels(tokens.decay[token]) * w for w in weights)
    return tuple(map(torch.add, weights, steps)), momentum


def _mini_batch_step(
    learner: InnerLearner,
    norms: Tensors,
    weights: Tensors,
    momentum: Tensors,
    gradients: list[Tensors],
    tokens: Tokens,
    mini_batch: range,
) -> tuple[Tensors, Tensors]:
    """The same, once: gradients summed, momentum's mean, decay's product."""
    steps = tuple(-torch.stack(one).sum(0) for one in zip(*gradients, strict=True))
    here = slice(mini_batch.start, mini_batch.stop)
    if tokens.momentum is not None:
        theta = tokens.momentum[here].mean(0)[:, None, None]
        steps = tuple(theta * s + step for s, step in zip(momentum, steps, strict=True))
        momentum = steps
    if learner.muon:
        steps = tuple(map(orthogonalize, steps))
    if tokens.decay is not None:
        weights = tuple(_channels(tokens.decay[here].prod(0)) * w for w in weights)
    weights = tuple(map(torch.add, weights, steps))
    if learner.normalize:
        weights = tuple(map(with_norms, weights, norms))
    return weights, momentum


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hi,hio->ho", x, weight)


def _channels(decay: torch.Tensor) -> torch.Tensor:
    """``[H]`` or ``[H, D]`` to what multiplies ``[H, in, out]``."""
    return decay[:, None, None] if decay.ndim == 1 else decay[..., None]


def _map(carried: Carried, row: int) -> Carried:
    groups = (carried.weights, carried.momentum, carried.norms)
    return Carried(*(tuple(tensor[row] for tensor in group) for group in groups))
