"""Architectures whose attention can be replaced: where it is, what it projects, what it expects.

Shape legend: B rows, T tokens, C width, H heads, K key-value heads, D head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ttt_adapt.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of transformers.

    Attributes:
        layers: name of the list of decoder layers in the base model.
        attention: name of the attention module in a decoder layer.
        projections: names of the linear layers that make q, k, v and the output.
        rotary: whether q and k turn with their position.
    """

    layers: str
    attention: str
    projections: tuple[str, ...]
    rotary: bool


_LLAMA = Family("layers", "self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), rotary=True)
FAMILIES: dict[str, Family] = {
    "gpt2": Family("h", "attn", ("c_attn", "c_proj"), rotary=False),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def family_of(config: Any) -> Family:
    """The family of a model's configuration.

    Raises:
        ModelError: another architecture, or one with cross-attention.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ModelError(
            f"expected a model of type {', '.join(FAMILIES)}, found {kind!r}; attention of others "
            "cannot be converted"
        )
    if getattr(config, "add_cross_attention", False):
        raise ModelError("expected a model without cross-attention; load one that only decodes")
    return FAMILIES[kind]


def decoder_layers(model: Any) -> Any:
    """The list of decoder layers of a causal language model of a known family."""
    return getattr(model.base_model, family_of(model.config).layers)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a layer's attention: C, H, K and D."""

    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    width: int

    @classmethod
    def of(cls, config: Any) -> "HeadShape":
        heads = int(config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        return cls(int(config.hidden_size), heads, int(groups), int(width))


def project(
    attention: nn.Module, shape: HeadShape, hidden_BTC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer's own q ``[B, T, H, D]``, k and v ``[B, T, K, D]``, normed as it does, not rotated."""
    modules: Any = attention
    lead = hidden_BTC.shape[:-1]
    if hasattr(modules, "c_attn"):
        parts = modules.c_attn(hidden_BTC).split(shape.num_heads * shape.width, dim=-1)
        q, k, v = (part.view(*lead, shape.num_heads, shape.width) for part in parts)
        return q, k, v
    q = modules.q_proj(hidden_BTC).view(*lead, shape.num_heads, shape.width)
    k = modules.k_proj(hidden_BTC).view(*lead, shape.num_key_value_heads, shape.width)
    v = modules.v_proj(hidden_BTC).view(*lead, shape.num_key_value_heads, shape.width)
    if hasattr(modules, "q_norm"):
        q, k = modules.q_norm(q), modules.k_norm(k)
    return q, k, v


def to_query_heads(tensor_BTKD: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """Grouped keys or values for each query head, ``[B, T, H, D]``: each group's heads get copies."""
    groups = shape.num_heads // shape.num_key_value_heads
    return tensor_BTKD if groups == 1 else tensor_BTKD.repeat_interleave(groups, dim=2)


def project_out(attention: nn.Module, heads_BTHD: torch.Tensor) -> torch.Tensor:
    """The layer's own output projection (and dropout, where it has one), ``[B, T, C]``."""
    modules: Any = attention
    joined = heads_BTHD.flatten(2)
    if hasattr(modules, "c_proj"):
        found: torch.Tensor = modules.resid_dropout(modules.c_proj(joined))
        return found
    found = modules.o_proj(joined)
    return found


def real_tokens(
    attention_mask: torch.Tensor | None, batch: int, num_tokens: int
) -> torch.Tensor | None:
    """bool ``[B, T]``: which tokens are no padding, from the mask that attention layers get.

    That mask is ``None`` (all real), ``[B, S]`` (flash attention) or ``[B, 1, T, S]``, boolean or
    added to scores; in the last two a token that does not see itself is padding.

    Raises:
        ModelError: a mask of another kind, or several sequences packed into a row.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim not in (2, 4):
        raise ModelError(
            "expected an attention mask of sdpa, eager or flash attention, found "
            f"{type(attention_mask).__name__}; load the model with attn_implementation='sdpa'"
        )
    if attention_mask.ndim == 2:
        return attention_mask[:, -num_tokens:].bool().expand(batch, num_tokens)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    before = visible.shape[-1] - num_tokens
    real = visible[:, 0].diagonal(before, dim1=-2, dim2=-1).expand(batch, num_tokens)
    if num_tokens > 1:
        sees_last = visible[:, 0, 1:].diagonal(before, dim1=-2, dim2=-1).expand(batch, -1)
        if bool((real[:, 1:] & real[:, :-1] & ~sees_last).any()):
            raise ModelError(
                "expected one sequence in each row, found several packed ones; a converted layer "
                "would read them as one: give them rows of their own"
            )
    return real
