"""Causal attention of the Transformer++ baseline: rotary positions, no biases, a cache.

Shape legend: B rows, T tokens, S tokens attended to, C width, H heads, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ttt_adapt.layers import rotary_angles, rotate_pairs
from ttt_adapt.models.ttt.configuration import TTTConfig


@dataclass(frozen=True, slots=True, eq=False)
class AttentionState:
    """Keys and values of the tokens so far.

    Attributes:
        keys: ``[B, H, S, D]``, rotated; values: alike.
        real: bool ``[B, S]``, false for padding; ``None``: there is none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    real: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The state with every tensor changed."""
        real = None if self.real is None else change(self.real)
        return type(self)(change(self.keys), change(self.values), real)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors; :meth:`from_tensors` is the way back."""
        found = {"keys": self.keys, "values": self.values}
        return found if self.real is None else {**found, "real": self.real}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Self:
        return cls(tensors["keys"], tensors["values"], tensors.get("real"))

    def joined(self, later: "AttentionState") -> "AttentionState":
        """These tokens and those that follow them."""
        keys = torch.cat([self.keys.to(later.keys.dtype), later.keys], dim=2)
        values = torch.cat([self.values.to(later.values.dtype), later.values], dim=2)
        if self.real is None and later.real is None:
            return AttentionState(keys, values)
        real = [part.real_or_ones() for part in (self, later)]
        return AttentionState(keys, values, torch.cat(real, dim=1))

    def real_or_ones(self) -> torch.Tensor:
        if self.real is not None:
            return self.real
        shape = (self.keys.shape[0], self.keys.shape[2])
        return torch.ones(shape, dtype=torch.bool, device=self.keys.device)


class CausalAttention(nn.Module):
    """Softmax attention over the tokens so far, by ``attn_implementation`` of the configuration."""

    def __init__(self, config: TTTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_width = config.hidden_size // config.num_attention_heads
        self.is_causal = True
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        state: AttentionState | None = None,
        return_state: bool = False,
    ) -> tuple[torch.Tensor, AttentionState | None]:
        """The contract of :meth:`ttt_adapt.layers.TTTLayer.forward`."""
        batch, num_tokens, _ = hidden_BTC.shape
        split = (batch, num_tokens, self.num_heads, self.head_width)
        q, k, v = (
            projection(hidden_BTC).view(split)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        real = None if attention_mask is None else attention_mask.to(hidden_BTC.device).bool()
        angles = rotary_angles(
            self._positions(hidden_BTC, real, state), self.head_width, self.config.rope_theta
        )
        q, k = rotate_pairs(q, angles).transpose(1, 2), rotate_pairs(k, angles).transpose(1, 2)
        after = AttentionState(k, v.transpose(1, 2), real)
        if state is not None:
            after = state.joined(after)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _attend_eagerly
        )
        out, _ = attend(
            self,
            q,
            after.keys,
            after.values,
            _visible(after, num_tokens),
            dropout=0.0,
            scaling=self.head_width**-0.5,
        )
        found = self.o_proj(out.reshape(batch, num_tokens, -1))
        if real is not None:
            found = found * real[..., None]
        return found, after if return_state else None

    def _positions(
        self, hidden: torch.Tensor, real: torch.Tensor | None, state: AttentionState | None
    ) -> torch.Tensor:
        """Positions ``[1 or B, T]``: a row's own tokens so far, wherever its padding stands."""
        if real is None:
            position = torch.arange(hidden.shape[1], device=hidden.device)[None]
        else:
            position = (real.cumsum(1) - 1).clamp(min=0)
        if state is None:
            return position
        before = state.keys.shape[2] if state.real is None else state.real.sum(1, keepdim=True)
        return position + before


def _visible(state: AttentionState, num_tokens: int) -> torch.Tensor | None:
    """bool ``[B or 1, 1, T, S]``: what each query sees; ``None`` where causality alone says it."""
    num_seen = state.keys.shape[2]
    if state.real is None and num_tokens in (1, num_seen):
        return None
    column = torch.arange(num_seen, device=state.keys.device)
    row = column[num_seen - num_tokens :, None]
    seen = (column <= row)[None, None]
    if state.real is None:
        return seen
    # Padding sees itself, for a softmax over nothing is NaN.
    return (seen & state.real[:, None, None]) | (column == row)


def _attend_eagerly(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention written out, ``[B, H, T, D]`` to ``[B, T, H, D]``."""
    scores = (query @ key.transpose(2, 3)) * scaling
    seen = attention_mask
    if seen is None:
        num_tokens, num_seen = scores.shape[2:]
        seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(num_seen - num_tokens)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return (weights.to(query.dtype) @ value).transpose(1, 2), weights
