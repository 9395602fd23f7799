"""Causal attention while learning on CPU in bfloat16: blocks of matrix products.

torch's flash kernel for CPU reaches a third of what its matrix products do in bfloat16; written
as products over blocks of query rows that skip what lies in the future, attention takes half the
time. It is used for learning only, inside :func:`dense_attention`; whatever it does not cover
(masks, padding, dropout, other types) goes to transformers' own implementation.

Shape legend: B batch, H heads, T positions, D head width.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NAME = "ttt_adapt_dense"
_BLOCK = 192
"""Query rows per block: fewest seconds at 350 and 1,000 positions (128, 192 and 256 tried)."""


@contextlib.contextmanager
def dense_attention(model: Any) -> Iterator[None]:
    """Let ``model`` attend by :func:`blocked_causal_attention`, if it uses ``sdpa`` now."""
    config = model.config
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    _register()
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def blocked_causal_attention(
    query_BHTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTD: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale · Q Kᵀ + causal mask) V, ``[B, H, T, D]``, in the dtype of its inputs."""
    batch, heads, length, width = query_BHTD.shape
    query = (query_BHTD * scale).reshape(batch * heads, length, width)
    key = key_BHTD.reshape(batch * heads, length, width)
    value = value_BHTD.reshape(batch * heads, length, width)
    rows = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        future = query.new_full((end - start, end), float("-inf")).triu_(start + 1)
        scores = torch.baddbmm(future, query[:, start:end], key[:, :end].transpose(1, 2))
        rows.append(torch.bmm(torch.softmax(scores, dim=-1), value[:, :end]))
    whole = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    return whole.view(batch, heads, length, width)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    covered = (
        attention_mask is None
        and causal
        and dropout == 0.0
        and options.get("position_bias") is None
        and query.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and query.shape[2] == key.shape[2]
    )
    if not covered:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **options,
        )  # fmt: skip
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    dtype = torch.get_autocast_dtype("cpu")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast("cpu", enabled=False):
        found = blocked_causal_attention(query.to(dtype), key.to(dtype), value.to(dtype), scale)
    return found.transpose(1, 2).contiguous(), None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if NAME not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, _attend)
        # The masks that sdpa gets: none at all where causality says everything.
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
