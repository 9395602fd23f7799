"""From hidden states of tokens to one vector a text.

Shape legend: B texts, T tokens, H hidden width, D width of the result. Everything is float32,
whatever the hidden states are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ttt_adapt.errors import ModelError

Pooling = Callable[[Tensor, Tensor], Tensor]
"""(hidden states ``[B, T, H]``, lengths ``[B]``) to ``[B, H]``; a row's real tokens come first."""


def _real_tokens(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    positions_T = torch.arange(hidden_BTH.shape[1], device=hidden_BTH.device)
    return (positions_T < lengths_B[:, None])[..., None]


def mean(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    """Average over real tokens."""
    # where, not a product: padding may hold anything, and 0 · inf is not 0.
    kept_BTH = torch.where(_real_tokens(hidden_BTH, lengths_B), hidden_BTH, 0.0)
    return kept_BTH.sum(dim=1) / lengths_B[:, None]


def mean_sqrt(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    """Sum over real tokens, divided by the square root of their number."""
    return mean(hidden_BTH, lengths_B) * lengths_B[:, None].sqrt()


def weighted_mean(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    """Average weighted by position, from 1 (Muennighoff 2022, SGPT)."""
    kept_BTH = torch.where(_real_tokens(hidden_BTH, lengths_B), hidden_BTH, 0.0)
    weights_T = torch.arange(1, hidden_BTH.shape[1] + 1, device=hidden_BTH.device)
    total_B = lengths_B * (lengths_B + 1) / 2
    return (kept_BTH * weights_T[:, None]).sum(dim=1) / total_B[:, None]


def maximum(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    """Largest value of each coordinate over real tokens."""
    real_BT1 = _real_tokens(hidden_BTH, lengths_B)
    return torch.where(real_BT1, hidden_BTH, float("-inf")).amax(dim=1)


def first(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    """The first token's state ([CLS])."""
    return hidden_BTH[:, 0]


def last(hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
    """The last real token's state."""
    rows_B = torch.arange(len(hidden_BTH), device=hidden_BTH.device)
    return hidden_BTH[rows_B, lengths_B.long() - 1]


POOLINGS: dict[str, Pooling] = {
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt,
    "weightedmean": weighted_mean,
    "max": maximum,
    "cls": first,
    "lasttoken": last,
    "last": last,
}
"""By the names that sentence-transformers gives them, and ours."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A projection after pooling, as sentence-transformers stores it.

    Attributes:
        weights: its safetensors file, with ``linear.weight`` and perhaps ``linear.bias``.
        activation: the name of a class of ``torch.nn``.
    """

    weights: Path
    activation: str


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}


class Head(nn.Module):
    """Pooling, projections and normalisations, in the order a model's folder lists them."""

    def __init__(self, poolings: Sequence[str], steps: Sequence[DenseLayer | str] = ()) -> None:
        """
        Args:
            poolings: names of :data:`POOLINGS`; the results of several are concatenated.
            steps: projections, or ``"normalize"``.

        Raises:
            ModelError: a projection's file is damaged.
        """
        super().__init__()
        self._poolings = [POOLINGS[name] for name in poolings]
        self._steps = nn.ModuleList(
            _Normalize() if isinstance(step, str) else _load_dense(step) for step in steps
        )

    def forward(self, hidden_BTH: Tensor, lengths_B: Tensor) -> Tensor:
        hidden_BTH, lengths_B = hidden_BTH.float(), lengths_B.float()
        vectors_BD = torch.cat([pool(hidden_BTH, lengths_B) for pool in self._poolings], dim=1)
        for step in self._steps:
            vectors_BD = step(vectors_BD)
        return vectors_BD


class _Normalize(nn.Module):
    def forward(self, vectors_BD: Tensor) -> Tensor:
        return nn.functional.normalize(vectors_BD, dim=1)


def _load_dense(layer: DenseLayer) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(layer.weights)
        weight = tensors["linear.weight"].float()
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"{layer.weights}: not a projection's weights: {error}") from None
    bias = tensors.get("linear.bias")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias.float()
    return nn.Sequential(linear, ACTIVATIONS[layer.activation]())
