"""A layer's attention replaced by test-time training on its own queries, keys and values.

"TTT as a drop-in replacement for causal attention": o_t = f_θt(q_t), where θ_t has taken a step on
(k_t, v_t); the layer's q, k, v and output projections stay as they are.

Shape legend: B rows, T tokens, C width, H heads, D head width, b tokens in a mini-batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ttt_adapt.conversion_settings import ConversionSettings
from ttt_adapt.errors import ModelError
from ttt_adapt.models.conversion.cache import fast_weight_layer
from ttt_adapt.models.conversion.families import (
    HeadShape,
    project,
    project_out,
    real_tokens,
    to_query_heads,
)
from ttt_adapt.models.conversion.inner import InnerLearner

Role = Literal["converted", "original", "transfer"]
"""How a converted layer answers: as converted, as the attention it replaces, or as the latter while
reporting how far the former is from it."""


class TTTAttention(nn.Module):
    """Takes the place of an attention module and answers as a decoder layer of transformers expects.

    Attributes:
        attention: the module replaced; its projections are used, its softmax only where
            the mode or the role says so.
        inner: the fast weights.
        alpha: ``[C]``, of the gate, in ``gated`` mode.
    """

    def __init__(
        self,
        attention: nn.Module,
        settings: ConversionSettings,
        shape: HeadShape,
        layer: int,
        rotary: nn.Module | None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.inner = InnerLearner(settings, shape, layer)
        self.settings, self.shape, self.layer_idx = settings, shape, layer
        self.gated = settings.mode == "gated"
        if self.gated:
            alpha = torch.zeros(shape.hidden_size, device="cpu") + settings.alpha
            self.alpha = nn.Parameter(alpha)
        # Not a submodule: it is the base model's.
        self._rotary: tuple[Any, ...] = () if rotary is None else (rotary,)
        self.role: Role = "converted"
        self.on_transfer: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[B, T, C]`` and the attention weights, which are ``None`` without attention."""

        def attend() -> tuple[torch.Tensor, torch.Tensor | None]:
            if position_embeddings is not None:
                options["position_embeddings"] = position_embeddings
            found: tuple[torch.Tensor, torch.Tensor | None] = self.attention(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **options,
            )
            return found

        if self.role == "original":
            return attend()
        if self.role == "transfer":
            wanted, weights = attend()
            learned = self._learn(hidden_states, position_embeddings, attention_mask, None)
            if self.on_transfer is not None:
                self.on_transfer(self.layer_idx, learned, wanted.detach())
            return wanted, weights
        # Before attention, which fills the cache's layer: this one may have to be made first.
        out = self._learn(hidden_states, position_embeddings, attention_mask, past_key_values)
        if not self.gated:
            return out, None
        attended, weights = attend()
        return attended + torch.tanh(self.alpha).to(out.dtype) * out, weights

    def _learn(
        self,
        hidden_BTC: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor:
        batch, num_tokens = hidden_BTC.shape[:2]
        layer = None
        if cache is not None:
            layer = fast_weight_layer(cache, self.layer_idx, gated=self.gated)
        state = layer.state if layer is not None else None
        real = real_tokens(attention_mask, batch, num_tokens)
        q, k, v = project(self.attention, self.shape, hidden_BTC)
        angles = position_embeddings
        if self.settings.rotary == "mini-batch" and self._rotary:
            positions = _positions(real, batch, num_tokens, hidden_BTC.device)
            if state is not None:
                positions = positions + state.num_open[:, None]
            angles = self._rotary[0](hidden_BTC, positions % self.inner.mini_batch_size)
        if angles is not None and self.settings.rotary != "none":
            # [B or 1, T, D] against [B, T, H, D].
            q, k = apply_rotary_pos_emb(q, k, *angles, unsqueeze_dim=2)
        heads, after = self.inner(
            hidden_BTC,
            q,
            to_query_heads(k, self.shape),
            to_query_heads(v, self.shape),
            attention_mask=real,
            state=state,
            output_final_state=layer is not None,
        )
        if layer is not None:
            layer.store(after, num_tokens)
        return project_out(self.attention, heads)


@contextmanager
def layers_in_role(
    model: nn.Module, role: Role, layers: tuple[int, ...] | None = None
) -> Iterator[list[TTTAttention]]:
    """Converted layers (all, or those of these indices) answer in ``role`` meanwhile."""
    chosen = [m for m in converted_layers(model) if layers is None or m.layer_idx in layers]
    before = [module.role for module in chosen]
    for module in chosen:
        module.role = role
    try:
        yield chosen
    finally:
        for module, old in zip(chosen, before, strict=True):
            module.role = old


def converted_layers(model: nn.Module) -> list[TTTAttention]:
    """The converted layers of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, TTTAttention)]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the original does not have, by their names in ``model``."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, TTTAttention):
            own = {f"inner.{key}": p for key, p in module.inner.named_parameters()}
            if module.gated:
                own["alpha"] = module.alpha
            found |= {f"{name}.{key}": parameter for key, parameter in own.items()}
    return found


def require_static_rotary(config: Any) -> None:
    """Positions within the mini-batch need rotary tables that do not change with length.

    Raises:
        ModelError: they do.
    """
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ModelError(
            f"expected rotary positions that do not depend on length, found rope_type {kind!r}; "
            "convert with rotary='original'"
        )


def _positions(
    real: torch.Tensor | None, batch: int, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """int64 ``[B, T]``: how many real tokens of this call come before each."""
    if real is None:
        return torch.arange(num_tokens, device=device).expand(batch, -1)
    return (real.cumsum(1) - 1).clamp(min=0)
