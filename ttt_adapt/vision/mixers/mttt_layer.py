"""The MTTT layer: a drop-in for attention whose heads learn from the image before they answer.

    layer = MTTT(192, 3, learner="mlp", strategy="sgd", steps=4)
    mixed = layer(tokens)                     # [B, T, D], tokens after the block's layer norm
    losses = layer.inner_losses(tokens)       # [5]: before each inner step, and after the last

Shape legend: B images, T tokens, D width, N heads, d = D / N, F = 4 d, S inner steps.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.layers.rotary import rotary_angles, rotate_pairs
from ttt_adapt.vision.inner_loop.function import Recorder, mttt
from ttt_adapt.vision.inner_loop.learners import HIDDEN_FACTOR
from ttt_adapt.vision.inner_loop.presets import preset as preset_named
from ttt_adapt.vision.inner_loop.reconstruction import Decoder, Norm
from ttt_adapt.vision.mixers.projections import (
    into_heads,
    new_projection,
    out_of_heads,
    uniform_,
)


class MTTT(nn.Module):
    """Sequence layer of inner loops (MTTT, sections 2 to 5 and appendix B).

    φ, ψ and h are the ``nn.Linear`` of all heads ``key``, ``query`` and ``out``; g is
    ``decoder_weight [N, d, D]`` and ``decoder_bias [D]`` (with ``targets="values"`` an ``nn.Linear``
    ``value`` in its place). W0 is in ``inner`` (parameters if learned, buffers if fixed).

    Args:
        dim: D; num_heads: N, a divisor of it.
        preset: ``code`` or ``paper``: where the public JAX code and the paper differ.
        options: of :class:`~ttt_adapt.vision.inner_loop.MTTTSettings`, in the place of the preset's:
            learner, strategy, steps, eta, normalizer, ....

    Attributes:
        generator: the order of SGD's mini-batches while training (on the CPU); ``None``: torch's own.
            In evaluation the order depends on ``seed`` alone.
        recorder: called at each forward with the inner losses ``[S + 1, B, N]``, if set.

    Raises:
        ModelError: heads that do not divide the width.
        SettingsError: unknown options, or values that do not fit.
    """

    def __init__(self, dim: int, num_heads: int, *, preset: str = "code", **options: Any) -> None:
        super().__init__()
        self.settings = settings = preset_named(preset, **options)
        self.dim, self.num_heads = dim, num_heads
        self.query = new_projection(dim, num_heads, settings.bias)
        self.key = new_projection(dim, num_heads, settings.bias)
        self.out = new_projection(dim, num_heads, settings.bias)
        self.head_width = width = dim // num_heads
        if settings.rope_theta is not None and width % 2:
            raise ModelError(f"expected an even head width for rotary positions, found {width}")
        self.value = self.gate = None
        if settings.targets == "values":
            self.value = new_projection(dim, num_heads, settings.bias)
        else:
            self.decoder_weight = nn.Parameter(torch.empty(num_heads, width, dim))
            uniform_(self.decoder_weight, 1 / dim)
            if settings.bias:
                self.decoder_bias = nn.Parameter(torch.zeros(dim))
        if settings.decoder_norm:
            self.decoder_norm_weight = nn.Parameter(torch.ones(num_heads, dim))
            self.decoder_norm_bias = nn.Parameter(torch.zeros(num_heads, dim))
        if settings.feature_norm:
            self.feature_norm_weight = nn.Parameter(torch.ones(num_heads, width))
            self.feature_norm_bias = nn.Parameter(torch.zeros(num_heads, width))
        if settings.gate:
            self.gate = new_projection(dim, num_heads, bias=False)
        self.inner = InnerWeights(self)
        self.generator: torch.Generator | None = None
        self.recorder: Recorder | None = None

    def forward(self, tokens_BTD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        return self._mix(tokens_BTD, self.recorder)

    def inner_losses(self, tokens_BTD: torch.Tensor) -> torch.Tensor:
        """The inner loss before each step and after the last, float32 ``[S + 1]``: summed over heads,
        averaged over images, as the public code reports it. For causal strategies each token's,
        before the step of its mini-batch, ``[T]``."""
        found: list[torch.Tensor] = []
        with torch.no_grad():
            self._mix(tokens_BTD, found.append)
        return found[0].sum(-1).mean(-1)

    def _mix(self, tokens_BTD: torch.Tensor, recorder: Recorder | None) -> torch.Tensor:
        settings = self.settings
        q = into_heads(self.query(tokens_BTD), self.num_heads)
        k = into_heads(self.key(tokens_BTD), self.num_heads)
        if settings.rope_theta is not None:
            q, k = self._turned(q), self._turned(k)
        targets = tokens_BTD
        if self.value is not None:
            targets = into_heads(self.value(tokens_BTD), self.num_heads)
        found = mttt(
            q,
            k,
            targets,
            self.inner.weights(),
            learner=settings.learner,
            strategy=settings.strategy,
            steps=settings.steps,
            mini_batch_size=settings.mini_batch_size,
            eta=settings.eta,
            normalizer=settings.normalizer,
            decoder=self._decoder(),
            residual=settings.residual,
            feature_norm=self._feature_norm(),
            generator=self._order(),
            closed_form=settings.closed_form,
            recorder=recorder,
        )
        mixed = out_of_heads(found)
        if self.gate is not None:
            mixed = mixed * functional.gelu(self.gate(tokens_BTD))
        answer: torch.Tensor = self.out(mixed)
        return answer

    def _decoder(self) -> Decoder | None:
        if self.value is not None:
            return None
        norm = None
        if self.settings.decoder_norm:
            norm = Norm(self.decoder_norm_weight, self.decoder_norm_bias)
        bias = self.decoder_bias if self.settings.bias else None
        return Decoder(self.decoder_weight, bias, norm)

    def _feature_norm(self) -> Norm | None:
        if not self.settings.feature_norm:
            return None
        return Norm(self.feature_norm_weight, self.feature_norm_bias)

    def _order(self) -> torch.Generator | None:
        if self.settings.strategy != "sgd" or self.training:
            return self.generator
        return torch.Generator().manual_seed(self.settings.seed)

    def _turned(self, tensor_BNTd: torch.Tensor) -> torch.Tensor:
        """Rotary positions: of the token, within its mini-batch where these are causal."""
        assert self.settings.rope_theta is not None
        position = torch.arange(tensor_BNTd.shape[2], device=tensor_BNTd.device)
        if self.settings.strategy == "minibatch":
            position = position % self.settings.mini_batch_size
        angles = rotary_angles(position[None], self.head_width, self.settings.rope_theta)
        return rotate_pairs(tensor_BNTd.transpose(1, 2), angles).transpose(1, 2)

    def extra_repr(self) -> str:
        changed = self.settings.model_dump()
        shown = ("learner", "strategy", "steps", "eta", "normalizer")
        return f"{self.dim}, num_heads={self.num_heads}, " + ", ".join(
            f"{name}={changed[name]!r}" for name in shown
        )


class InnerWeights(nn.Module):
    """W0 of every head: ``weight [N, d, d]``, ``bias [N, d]``, or ``w1 [N, d, F], b1, w2, b2``; nothing
    where it is zero."""

    def __init__(self, layer: MTTT) -> None:
        super().__init__()
        settings, heads, width = layer.settings, layer.num_heads, layer.head_width
        self.names: list[str] = []
        if settings.initial == "zero":
            if settings.learner_bias:
                self._keep("weight", torch.zeros(heads, width, width), learned=False)
                self._keep("bias", torch.zeros(heads, width), learned=False)
            return
        learned, hidden = settings.initial == "learned", HIDDEN_FACTOR * width
        shapes = [("weight", "bias", width, width)]
        if settings.learner == "mlp":
            shapes = [("w1", "b1", width, hidden), ("w2", "b2", hidden, width)]
        for weight, bias, fan_in, fan_out in shapes:
            # Xavier, head by head.
            start = uniform_(torch.empty(heads, fan_in, fan_out), 2 / (fan_in + fan_out))
            self._keep(weight, start, learned)
            if settings.learner_bias:
                self._keep(bias, torch.zeros(heads, fan_out), learned)

    def weights(self) -> list[torch.Tensor] | None:
        """As ``mttt`` takes them; ``None`` for zero."""
        return [getattr(self, name) for name in self.names] or None

    def _keep(self, name: str, tensor: torch.Tensor, learned: bool) -> None:
        self.names.append(name)
        if learned:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)
