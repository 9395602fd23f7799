"""The linear learner's steps in closed form: the tokens enter through two d × d matrices alone.

Where no norm stands in its way, the loss is quadratic, ``½ Σ_j r_j ‖k_j W G − y_j‖²`` with
``y = target − c − [k G]``, and its gradient is ``A W M − C``:

    A = Σ r k kᵀ        M = G Gᵀ        C = Σ r k (y Gᵀ)ᵀ

so that a step costs d³, whatever the number of tokens. One step from zero needs C only, which is
linear attention with keys k and values ``y Gᵀ`` (MTTT, equations 10 and 11).

Shape legend: B images, N heads, T tokens, d head width, D width, E = d or d + 1, with a bias.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from ttt_adapt.vision.inner_loop.descent import Examples
from ttt_adapt.vision.inner_loop.learners import Layer
from ttt_adapt.vision.inner_loop.reconstruction import Reconstruction


class Values(NamedTuple):
    """``examples``, whose targets are ``y Gᵀ [B, N, T, d]`` and keys end with a one if biased, and
    ``metric``: M ``[N, d, d]``, ``None`` for the identity, or where nothing needs it."""

    examples: Examples
    metric: torch.Tensor | None


def as_values(
    examples: Examples, problem: Reconstruction, *, biased: bool, first_alone: bool
) -> Values:
    """The quadratic problem of a linear learner; ``first_alone``: of one step from zero."""
    keys, targets, rates = examples
    decoder = problem.decoder
    metric = None
    if decoder is None:
        values = targets - keys if problem.residual else targets
    else:
        # [B, 1, T, D] @ [N, D, d]: one product for all heads where the targets are the tokens.
        if problem.residual or not first_alone:
            metric = decoder.weight @ decoder.weight.mT
        centred = targets if decoder.bias is None else targets - decoder.bias
        if centred.shape[1] == 1:
            heads, width, wide = decoder.weight.shape
            joint = centred[:, 0] @ decoder.weight.reshape(heads * width, wide).T
            values = joint.view(*joint.shape[:2], heads, width).transpose(1, 2)
        else:
            values = centred @ decoder.weight.mT
        if problem.residual and metric is not None:
            values = values - keys @ metric
    if biased:
        keys = functional.pad(keys, (0, 1), value=1.0)
    return Values(Examples(keys, values, rates), metric)


def quadratic_step(
    weight: torch.Tensor | None, examples: Examples, metric: torch.Tensor | None, rate: float
) -> torch.Tensor:
    """``W − rate (A W M − C)``, ``[B, N, E, d]``; weight ``None`` is zero."""
    keys, values, rates = examples
    weighted = keys if rates is None else keys * rates[..., None]
    correlation = weighted.mT @ values
    if weight is None:
        return rate * correlation
    moment = (weighted.mT @ keys) @ weight
    if metric is not None:
        moment = moment @ metric
    return weight - rate * (moment - correlation)


def joined(layer: Layer | None) -> torch.Tensor | None:
    """Weight and bias as one matrix ``[.., E, d]``."""
    if layer is None or layer.bias is None:
        return None if layer is None else layer.weight
    return torch.cat((layer.weight, layer.bias[..., None, :]), dim=-2)


def parted(weight_BNEd: torch.Tensor, *, biased: bool) -> Layer:
    """The reverse of :func:`joined`."""
    if not biased:
        return Layer(weight_BNEd, None)
    return Layer(weight_BNEd[..., :-1, :], weight_BNEd[..., -1, :])
