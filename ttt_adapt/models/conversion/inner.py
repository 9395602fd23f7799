"""What a converted layer learns with: weights where a sequence begins, rates, and how they step.

Shape legend: B rows, T tokens, C width, H heads, D head width, F hidden width, b tokens in a
mini-batch.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.conversion_settings import ConversionSettings
from ttt_adapt.kernels.inner_loop.plain import PLAIN, plain_fast_weights
from ttt_adapt.kernels.inner_loop.state import FastWeightState
from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.kernels.ttt_mlp import ttt_mlp
from ttt_adapt.models.conversion.families import HeadShape

_GELU_POWER = 0.425
"""E[gelu(z)²] for a standard normal z."""
_NAMES = {"ttt-linear": ("weight", "bias"), "ttt-mlp": ("w1", "b1", "w2", "b2")}
_PLAIN_NAMES = {"ttt-linear": ("weight",), "ttt-mlp": ("w1", "w2")}


class InnerLearner(nn.Module):
    """The fast weights of one layer: pure (constants only) or with parameters of their own.

    Parameters, none of them in ``pure`` mode: the weights where a sequence begins (``weight``,
    ``bias`` or ``w1``, ``b1``, ``w2``, ``b2``), ``lr_weight [H, C]`` and ``lr_bias [H]`` of the
    learning-rate gate ``2 σ(w·x + b)``, ``token_scale [b]``, with ``inner_norm`` ``ln_weight`` and
    ``ln_bias [H, D]``, with ``feature_maps`` ``q_map`` and ``k_map [H, D, D]``. At their initial
    values the layer computes what it would in pure mode. Weights that are drawn at random are a
    buffer in pure mode, so that they are saved; those that are zero are not kept.

    Args:
        settings: resolved: no ``None`` in it.
        shape: of the layer's attention.
        layer: its index, which sets its random weights apart from others'.
    """

    def __init__(self, settings: ConversionSettings, shape: HeadShape, layer: int) -> None:
        super().__init__()
        assert settings.mini_batch_size is not None and settings.learning_rate is not None
        self.settings, self.shape, self.layer = settings, shape, layer
        self.mini_batch_size, self.learning_rate = settings.mini_batch_size, settings.learning_rate
        learned = settings.mode != "pure"
        for name, value in self._initial_weights().items():
            if learned:
                self.register_parameter(name, nn.Parameter(value))
            elif bool(value.any()):
                self.register_buffer(name, value)
        if learned:
            heads, width = shape.num_heads, shape.width
            # Not from torch's random state, and right on any device: see _initial_weights.
            self.lr_weight = nn.Parameter(_zeros(heads, shape.hidden_size))
            self.lr_bias = nn.Parameter(_zeros(heads))
            self.token_scale = nn.Parameter(_zeros(self.mini_batch_size))
            if settings.inner_norm:
                self.ln_weight = nn.Parameter(_zeros(heads, width) + 1.0)
                self.ln_bias = nn.Parameter(_zeros(heads, width))
            if settings.feature_maps:
                eye = torch.eye(width, device="cpu").expand(heads, -1, -1)
                self.q_map = nn.Parameter(eye.clone())
                self.k_map = nn.Parameter(eye.clone())

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        state: FastWeightState | None = None,
        output_final_state: bool = False,
    ) -> tuple[torch.Tensor, FastWeightState | None]:
        """Read the tokens and answer them.

        Args:
            hidden_BTC: the layer's input, for the learning-rate gate.
            q: ``[B, T, H, D]``; k, v alike.
            attention_mask: ``[B, T]``, zero for padding.

        Returns:
            ``[B, T, H, D]`` and the state after the last token, or ``None``.
        """
        # Autocast would round the state after every step.
        with torch.autocast(q.device.type, enabled=False):
            return self._read(hidden_BTC, q, k, v, attention_mask, state, output_final_state)

    def _read(
        self,
        hidden_BTC: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None,
        state: FastWeightState | None,
        output_final_state: bool,
    ) -> tuple[torch.Tensor, FastWeightState | None]:
        if hasattr(self, "q_map"):
            q = torch.einsum("bthd,hde->bthe", q, self.q_map.to(q.dtype))
            k = torch.einsum("bthd,hde->bthe", k, self.k_map.to(k.dtype))
        if self.settings.qk_norm == "l2":
            q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        # Under autocast norms give float32 and projections do not.
        common = torch.promote_types(q.dtype, v.dtype)
        q, k, v = q.to(common), k.to(common), v.to(common)
        rate = self._rate(hidden_BTC)
        if not self.settings.inner_norm:
            names = _PLAIN_NAMES[self.settings.to]
            return plain_fast_weights(
                q, k, v, rate,
                inner=PLAIN[self.settings.to],
                weights=tuple(self._weight(name, q.device) for name in names),
                token_scale=self._token_scale(q.device),
                initial_state=state,
                output_final_state=output_final_state,
                attention_mask=attention_mask,
            )  # fmt: skip
        shared: dict[str, Any] = {
            name: self._weight(name, q.device) for name in _NAMES[self.settings.to]
        }
        heads, width = self.shape.num_heads, self.shape.width
        learned = hasattr(self, "ln_weight")
        operator: Any = ttt_linear if self.settings.to == "ttt-linear" else ttt_mlp
        found: tuple[torch.Tensor, FastWeightState | None] = operator(
            q, k, v, rate,
            **shared,
            token_scale=self._token_scale(q.device),
            ln_weight=self.ln_weight if learned else torch.ones(heads, width, device=q.device),
            ln_bias=self.ln_bias if learned else torch.zeros(heads, width, device=q.device),
            mini_batch_size=self.mini_batch_size,
            initial_state=state,
            output_final_state=output_final_state,
            attention_mask=attention_mask,
        )  # fmt: skip
        return found

    @property
    def num_state_values(self) -> int:
        """Numbers in one sequence's state: weights, and the open mini-batch's inputs and gradients."""
        heads, width, hidden = self.shape.num_heads, self.shape.width, 0
        if self.settings.to == "ttt-mlp":
            hidden = self.settings.hidden_factor * width
        weights = sum(math.prod(shape) for shape in self._weight_shapes().values())
        return weights + heads * self.mini_batch_size * 2 * (width + hidden)

    def _rate(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]``, float32."""
        base = self.learning_rate / self._rate_divisor()
        if not hasattr(self, "lr_weight"):
            batch, num_tokens = hidden_BTC.shape[:2]
            return torch.full(
                (batch, num_tokens, self.shape.num_heads), base, device=hidden_BTC.device
            )
        gate = functional.linear(hidden_BTC.float(), self.lr_weight.float(), self.lr_bias.float())
        return base * 2.0 * gate.sigmoid()

    def _rate_divisor(self) -> float:
        """What brings a step of rate one near the one that fits its token exactly."""
        if self.settings.inner_norm:
            return float(self.shape.width)  # the convention of the TTT paper
        if self.settings.to == "ttt-mlp":
            return _GELU_POWER * self.settings.hidden_factor * self.shape.width
        return 1.0

    def _token_scale(self, device: torch.device) -> torch.Tensor:
        """``[b]``: the mean of the mini-batch's gradients with ``inner_norm``, else their sum."""
        size = self.mini_batch_size
        scale = torch.ones(size, device=device)
        if self.settings.inner_norm:
            scale = scale / torch.arange(1, size + 1, device=device)
        if hasattr(self, "token_scale"):
            scale = (scale + self.token_scale.float()).clamp(min=0.0)
        return scale

    def _weight(self, name: str, device: torch.device) -> torch.Tensor:
        found = getattr(self, name, None)
        if isinstance(found, torch.Tensor):
            return found
        return torch.zeros(self._weight_shapes()[name], device=device)

    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, width = self.shape.num_heads, self.shape.width
        hidden = self.settings.hidden_factor * width
        shapes = {
            "weight": (heads, width, width),
            "bias": (heads, width),
            "w1": (heads, width, hidden),
            "b1": (heads, hidden),
            "w2": (heads, hidden, width),
            "b2": (heads, width),
        }
        names = (_NAMES if self.settings.inner_norm else _PLAIN_NAMES)[self.settings.to]
        return {name: shapes[name] for name in names}

    def _initial_weights(self) -> dict[str, torch.Tensor]:
        """Made on the CPU whatever the default device: a model may be rebuilt without memory."""
        generator = torch.Generator("cpu").manual_seed((self.settings.seed + self.layer) % 2**63)
        spread = dict.fromkeys(self._weight_shapes(), 0.0)
        if self.settings.inner_norm:
            spread |= {name: 0.02 for name in ("weight", "w1", "w2") if name in spread}
        elif self.settings.to == "ttt-mlp":
            # Hidden values of unit variance for keys of length one; W2 = 0 answers zero at first.
            spread["w1"] = 1.0 if self.settings.qk_norm == "l2" else self.shape.width**-0.5
        return {
            name: torch.randn(shape, generator=generator, device="cpu") * spread[name]
            for name, shape in self._weight_shapes().items()
        }


def resolved(settings: ConversionSettings, layers: tuple[int, ...]) -> ConversionSettings:
    """The settings with nothing left to be decided.

    The default rates: plain, 0.2, at most 1.6 over the mini-batch's size, so that a mini-batch of
    equal keys cannot overshoot; with ``inner_norm``, what the TTT paper's gates begin with.
    """
    size = settings.mini_batch_size or (1 if settings.mode == "pure" else 16)
    rate = settings.learning_rate
    if rate is None and settings.inner_norm:
        rate = 0.5 if settings.to == "ttt-linear" else 0.05
    elif rate is None:
        rate = min(0.2, 1.6 / size)
    return settings.model_copy(
        update={
            "layers": ",".join(map(str, layers)) or "none",
            "mini_batch_size": size,
            "learning_rate": rate,
        }
    )


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="cpu")
