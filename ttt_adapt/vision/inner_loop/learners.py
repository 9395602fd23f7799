"""Inner-loop learners ``f(.; W)``, one for each head: a linear model and a two-layer perceptron.

What an optimizer needs of a learner is its layers' inputs and output gradients, its *slots*: their
products are the gradients, and their parts the dual form of causal mini-batches.

Shape legend: B images, N heads, n tokens, d head width, F hidden width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.vision.inner_loop.second_order import gelu_backward

LearnerName = Literal["linear", "mlp"]

HIDDEN_FACTOR = 4
"""Hidden width of the perceptron in head widths (MTTT, section 5)."""


class Layer(NamedTuple):
    """An affine layer ``x W + b``: ``weight [N or B, N, in, out]``, ``bias [..., out]`` or ``None``."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def apply(self, x_BNnd: torch.Tensor) -> torch.Tensor:
        out = x_BNnd @ self.weight
        return out if self.bias is None else out + self.bias[..., None, :]


class Slot(NamedTuple):
    """A layer's inputs ``[B, N, n, in]`` and the loss's gradients by its outputs ``[B, N, n, out]``."""

    inputs: torch.Tensor
    gradients: torch.Tensor


Layers = tuple[Layer, ...]
Slots = tuple[Slot, ...]
Saved = tuple[torch.Tensor, ...]


class Learner(ABC):
    """A head's model; stateless, its weights are handed in."""

    name: LearnerName
    num_layers: int

    @abstractmethod
    def forward(self, layers: Layers, x_BNnd: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """``f(x; W) [B, N, n, d]``, and what :meth:`slots` needs of it."""

    @abstractmethod
    def slots(self, layers: Layers, saved: Saved, d_out_BNnd: torch.Tensor) -> Slots:
        """Each layer's slot, given the gradient by the learner's output."""

    @abstractmethod
    def dual(
        self, layers: Layers, slots: Slots, visible: torch.Tensor, x_BNnd: torch.Tensor
    ) -> torch.Tensor:
        """``f(x_i; W − Σ_j visible[i, j] ∇_j)``, ``[B, N, n, d]``; visible ``[n, m]``."""

    def __call__(self, layers: Layers, x_BNnd: torch.Tensor) -> torch.Tensor:
        return self.forward(layers, x_BNnd)[0]

    def layers(self, weights: Sequence[torch.Tensor]) -> Layers:
        """Weights as layers: each layer's weight ``[.., in, out]``, with biases or without.

        Raises:
            OperatorInputError: another number of tensors.
        """
        if len(weights) == self.num_layers:
            return tuple(Layer(weight, None) for weight in weights)
        if len(weights) == 2 * self.num_layers:
            pairs = zip(weights[::2], weights[1::2], strict=True)
            return tuple(Layer(weight, bias) for weight, bias in pairs)
        raise OperatorInputError(
            f"mttt: expected {self.num_layers} weights for the learner {self.name!r}, or with "
            f"biases {2 * self.num_layers}, found {len(weights)}"
        )


class LinearLearner(Learner):
    """``f(x) = x W [+ b]`` (MTTT, equation 7; Vision-TTT, section 3)."""

    name, num_layers = "linear", 1

    def forward(self, layers: Layers, x_BNnd: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        return layers[0].apply(x_BNnd), (x_BNnd,)

    def slots(self, layers: Layers, saved: Saved, d_out_BNnd: torch.Tensor) -> Slots:
        return (Slot(saved[0], d_out_BNnd),)

    def dual(
        self, layers: Layers, slots: Slots, visible: torch.Tensor, x_BNnd: torch.Tensor
    ) -> torch.Tensor:
        return _dual_layer(layers[0], slots[0], visible, x_BNnd)


class MlpLearner(Learner):
    """``f(x) = gelu(x W1 [+ b1]) W2 [+ b2]``, GELU in its tanh form (MTTT, section 5)."""

    name, num_layers = "mlp", 2

    def forward(self, layers: Layers, x_BNnd: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        before = layers[0].apply(x_BNnd)
        hidden = functional.gelu(before, approximate="tanh")
        return layers[1].apply(hidden), (x_BNnd, before, hidden)

    def slots(self, layers: Layers, saved: Saved, d_out_BNnd: torch.Tensor) -> Slots:
        x, before, hidden = saved
        d_hidden = d_out_BNnd @ layers[1].weight.mT
        return Slot(x, gelu_backward(d_hidden, before)), Slot(hidden, d_out_BNnd)

    def dual(
        self, layers: Layers, slots: Slots, visible: torch.Tensor, x_BNnd: torch.Tensor
    ) -> torch.Tensor:
        before = _dual_layer(layers[0], slots[0], visible, x_BNnd)
        hidden = functional.gelu(before, approximate="tanh")
        return _dual_layer(layers[1], slots[1], visible, hidden)


LEARNERS: dict[str, Learner] = {"linear": LinearLearner(), "mlp": MlpLearner()}


def learner_named(name: str) -> Learner:
    """Raises :class:`OperatorInputError` for a name that is none."""
    if name not in LEARNERS:
        raise OperatorInputError(
            f"mttt: expected a learner of {', '.join(LEARNERS)}, found {name!r}"
        )
    return LEARNERS[name]


def gradients(layers: Layers, slots: Slots) -> Layers:
    """The loss's gradient by each weight, summed over the slots' tokens."""
    return tuple(
        Layer(
            slot.inputs.mT @ slot.gradients,
            None if layer.bias is None else slot.gradients.sum(-2),
        )
        for layer, slot in zip(layers, slots, strict=True)
    )


def descend(layers: Layers, step: Layers, rate: float) -> Layers:
    """``W − rate · step``."""
    return tuple(
        Layer(
            layer.weight - rate * change.weight,
            None if layer.bias is None or change.bias is None else layer.bias - rate * change.bias,
        )
        for layer, change in zip(layers, step, strict=True)
    )


def _dual_layer(
    layer: Layer, slot: Slot, visible: torch.Tensor, x_BNnd: torch.Tensor
) -> torch.Tensor:
    """The layer's output under each row's own weights, without forming these (the dual form)."""
    scores = x_BNnd @ slot.inputs.mT
    if layer.bias is not None:
        scores = scores + 1.0
    return layer.apply(x_BNnd) - (scores * visible) @ slot.gradients
