"""Multiply-adds of inner loops, by their options: what products of matrices ``mttt`` computes.

Shape legend: T tokens, n tokens of a step, N heads, d head width, D width, F hidden width, e = d, with a
bias in the learner d + 1.
"""

from typing import NamedTuple

from ttt_adapt.kernels.inner_loop.counting import inner_loop_macs
from ttt_adapt.vision.inner_loop.learners import HIDDEN_FACTOR
from ttt_adapt.vision.inner_loop.presets import MTTTSettings


class Sizes(NamedTuple):
    """Of a layer."""

    num_heads: int
    width: int

    @property
    def dim(self) -> int:
        return self.num_heads * self.width

    @property
    def hidden(self) -> int:
        return HIDDEN_FACTOR * self.width


def mttt_macs(settings: MTTTSettings, sizes: Sizes, num_tokens: int, batch_size: int) -> int:
    """A forward of :class:`~ttt_adapt.vision.mixers.MTTT` but for its ``nn.Linear``."""
    strategy = settings.strategy
    if strategy in ("minibatch", "online"):
        size = settings.mini_batch_size if strategy == "minibatch" else 1
        return batch_size * _causal(settings, sizes, num_tokens, size)
    norms = settings.feature_norm or settings.decoder_norm
    if settings.learner == "linear" and settings.closed_form and not norms:
        return _closed_form(settings, sizes, num_tokens, batch_size)
    one_image = _forward(settings, sizes, num_tokens)
    for count in _parts(settings, num_tokens):
        one_image += _step(settings, sizes, count)
    return batch_size * one_image


def _parts(settings: MTTTSettings, num_tokens: int) -> list[int]:
    """Tokens of each step."""
    if settings.strategy == "full" or not settings.steps:
        return [num_tokens] * settings.steps
    each, more = divmod(num_tokens, settings.steps)
    return [each + (step < more) for step in range(settings.steps)]


def _forward(settings: MTTTSettings, sizes: Sizes, count: int) -> int:
    """The learner on ``count`` tokens: d² each, or 2 d F."""
    if settings.learner == "linear":
        return sizes.num_heads * count * sizes.width**2
    return sizes.num_heads * count * 2 * sizes.width * sizes.hidden


def _slots(settings: MTTTSettings, sizes: Sizes, count: int) -> int:
    """Layers' output gradients: the decoder both ways 2 d D, back through the perceptron d F."""
    heads, width = sizes.num_heads, sizes.width
    found = 2 * width * sizes.dim if settings.targets == "tokens" else 0
    if settings.learner == "mlp":
        found += width * sizes.hidden
    return heads * count * found


def _step(settings: MTTTSettings, sizes: Sizes, count: int) -> int:
    """Forward, backward, and the weights' gradients, which cost what the forward does."""
    return 2 * _forward(settings, sizes, count) + _slots(settings, sizes, count)


def _closed_form(settings: MTTTSettings, sizes: Sizes, num_tokens: int, batch_size: int) -> int:
    """M = G Gᵀ once, if needed; values; ``A W M − C`` for each step, from zero C alone; answers."""
    heads, width, dim = sizes.num_heads, sizes.width, sizes.dim
    metric = settings.targets == "tokens"
    from_zero = settings.initial == "zero" and not settings.learner_bias
    side = width + settings.learner_bias
    once = one_image = 0
    if settings.steps and metric:
        if settings.residual or settings.steps > 1 or not from_zero:
            once += heads * width * width * dim
        one_image += num_tokens * dim * dim
        if settings.residual:
            one_image += heads * num_tokens * width * width
    for step, count in enumerate(_parts(settings, num_tokens)):
        one_image += heads * count * side * width
        if step or not from_zero:
            one_image += heads * (count * side * side + side * side * width)
            if metric:
                one_image += heads * side * width * width
    if settings.steps or not from_zero:
        one_image += heads * num_tokens * width * width
    return once + batch_size * one_image


def _causal(settings: MTTTSettings, sizes: Sizes, num_tokens: int, size: int) -> int:
    """By the TTT operator's formula where that computes it, else the dual form's."""
    heads, width = sizes.num_heads, sizes.width
    hidden = sizes.hidden if settings.learner == "mlp" else 0
    values = settings.targets == "values" and settings.residual and settings.feature_norm
    if values and settings.learner_bias and settings.closed_form:
        return inner_loop_macs(num_tokens, heads, width, size, hidden)
    found = 0
    for first in range(0, num_tokens, size):
        count = min(size, num_tokens - first)
        found += 2 * _forward(settings, sizes, count) + _slots(settings, sizes, count)
        found += heads * count * count * 2 * (width + hidden)
        if first + size < num_tokens:
            found += _forward(settings, sizes, count)
    return found
