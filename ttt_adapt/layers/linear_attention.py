"""Linear attention: the sum of all ``kᵀ v`` so far is what a query reads.

Katharopoulos et al. 2020 (arXiv 2006.16236), with its feature map and normaliser (``elu``) or without
both (``identity``), as most of its followers and the TTT paper have it.

Shape legend: B rows, T tokens, C width, H heads, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import ModelError, OperatorInputError
from ttt_adapt.kernels.fast_weights import InnerLearner, fast_weights
from ttt_adapt.kernels.inner_loop.carried import CarriedState
from ttt_adapt.layers.rotary import rotary_angles, rotate_pairs

FeatureMap = Literal["identity", "elu"]

_HEBB = InnerLearner(loss="dot")
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class LinearAttentionState(CarriedState):
    """What a linear attention layer leaves behind.

    Attributes:
        weight: ``Σ kᵀ v``, ``[B, H, D, D]``, float32 (float64 for float64 inputs).
        key_sum: ``Σ k``, ``[B, H, D]``, of the keys' features.
        num_tokens: int64 ``[B]``, tokens each row has read.
    """

    weight: torch.Tensor
    key_sum: torch.Tensor
    num_tokens: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The state with every tensor changed."""
        return type(self)(change(self.weight), change(self.key_sum), change(self.num_tokens))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors; :meth:`from_tensors` is the way back."""
        return {"weight": self.weight, "key_sum": self.key_sum, "num_tokens": self.num_tokens}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Self:
        return cls(tensors["weight"], tensors["key_sum"], tensors["num_tokens"])


class LinearAttention(nn.Module):
    """A layer of linear attention in the place of a :class:`ttt_adapt.layers.TTTLayer`: the same
    projections, rotary positions (of the whole sequence) and layer norm before the last projection.

    Args:
        hidden_size: C, a multiple of ``2 · num_heads``.
        num_heads: H.
        feature_map: ``elu``: queries and keys become ``elu(x) + 1`` after rotation, which keeps them
            positive, and outputs are divided by ``q · Σ k``; ``identity``: neither.
        rope_theta: base of the rotary positions.

    Raises:
        ModelError: sizes or a feature map that do not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        feature_map: FeatureMap = "identity",
        rope_theta: float = 10_000.0,
    ) -> None:
        super().__init__()
        if hidden_size % (2 * num_heads):
            raise ModelError(
                f"expected hidden_size to be a multiple of 2 · num_heads ({2 * num_heads}), found "
                f"{hidden_size}; rotary positions turn pairs of a head's dimensions"
            )
        if feature_map not in get_args(FeatureMap):
            raise ModelError(
                f"expected feature_map of {', '.join(get_args(FeatureMap))}, found {feature_map!r}"
            )
        self.num_heads, self.head_width = num_heads, hidden_size // num_heads
        self.feature_map, self.rope_theta = feature_map, rope_theta
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.post_norm = nn.LayerNorm(hidden_size, eps=1e-6)

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        state: LinearAttentionState | None = None,
        return_state: bool = False,
    ) -> tuple[torch.Tensor, LinearAttentionState | None]:
        """The contract of :meth:`ttt_adapt.layers.TTTLayer.forward`.

        Raises:
            OperatorInputError: shapes that do not fit.
        """
        batch, num_tokens, width = hidden_BTC.shape
        device, heads = hidden_BTC.device, (batch, num_tokens, self.num_heads, self.head_width)
        real = torch.ones(batch, num_tokens, dtype=torch.bool, device=device)
        if attention_mask is not None:
            if attention_mask.shape != real.shape:
                raise OperatorInputError(
                    f"linear_attention: expected attention_mask {list(real.shape)}, found "
                    f"{list(attention_mask.shape)}"
                )
            real = attention_mask.to(device).bool()
            # Padding may hold anything.
            hidden_BTC = hidden_BTC.masked_fill(~real[..., None], 0.0)
        before = 0 if state is None else state.num_tokens[:, None]
        position = (real.cumsum(1) - 1).clamp(min=0) + before
        angles = rotary_angles(position, self.head_width, self.rope_theta)
        q = rotate_pairs(self.q_proj(hidden_BTC).view(heads), angles)
        k = rotate_pairs(self.k_proj(hidden_BTC).view(heads), angles)
        v = self.v_proj(hidden_BTC).view(heads)
        # Autocast would round the state after every step.
        with torch.autocast(device.type, enabled=False):
            dtype = torch.promote_types(q.dtype, torch.float32)
            out, after = self._read(q.to(dtype), k.to(dtype), v.to(dtype), real, state)
        out = self.o_proj(self.post_norm(out.to(hidden_BTC.dtype).reshape(batch, -1, width)))
        if attention_mask is not None:
            out = out * real[..., None]
        return out, after if return_state else None

    def _read(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        real: torch.Tensor,
        state: LinearAttentionState | None,
    ) -> tuple[torch.Tensor, LinearAttentionState]:
        """``[B, T, H, D]`` and the state after the tokens; a rate of zero keeps padding out."""
        if self.feature_map == "elu":
            q, k = functional.elu(q) + 1, functional.elu(k) + 1
        lr = real[..., None].to(q.dtype).expand(q.shape[:3])
        out, learned = fast_weights(
            q,
            k,
            v,
            lr=lr,
            learner=_HEBB,
            mini_batch_size=1,
            initial_state=None if state is None else (state.weight.to(q.dtype),),
            output_final_state=True,
            check_finite=False,
        )
        assert learned is not None, "it was asked for"
        key_sums = (k * lr[..., None]).cumsum(1)
        num_tokens = real.sum(1)
        if state is not None:
            key_sums = key_sums + state.key_sum[:, None].to(q.dtype)
            num_tokens = num_tokens + state.num_tokens
        if self.feature_map == "elu":
            out = out / ((q * key_sums).sum(-1, keepdim=True) + _EPSILON)
        return out, LinearAttentionState(learned.weights[0], key_sums[:, -1], num_tokens)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, feature_map={self.feature_map}"
