"""Plain fast weights ``f_θ(q)`` with ``θ ← θ − η ∇½‖f_θ(k) − v‖²``: no norm, no residual.

What "TTT as a drop-in replacement for causal attention" needs: the queries, keys and values of a
softmax layer go in, an output of the same kind comes out, and nothing is left to be learned
beforehand. Linear: the delta rule; MLP: ``f(x) = gelu(x W1) W2``.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch,
n queries.
"""

import torch
from torch.nn import functional

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.checks import check_rows
from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import (
    InnerModel,
    Shared,
    Tensors,
    Tokens,
    gelu_derivative,
)
from ttt_adapt.kernels.inner_loop.operator import run_operator
from ttt_adapt.kernels.inner_loop.state import FastWeightState


class PlainModel(InnerModel):
    """What plain inner models share: the target is v, the output is ``f(q)``, and there is no bias."""

    def target(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v

    def answer(
        self, q: torch.Tensor, z: torch.Tensor, ln_weight: torch.Tensor, ln_bias: torch.Tensor
    ) -> torch.Tensor:
        return z

    def fold(self, weights: Tensors, slots: Tensors, scale: torch.Tensor) -> Tensors:
        scaled = scale[:, None, None, None]
        return tuple(
            weight - slots[2 * layer].transpose(-1, -2) @ (slots[2 * layer + 1] * scaled)
            for layer, weight in enumerate(weights)
        )


class PlainLinear(PlainModel):
    """``f(x) = x W``."""

    name, num_weights, num_slots = "ttt-linear", 1, 2

    def slots(
        self, weights: Tensors, k: torch.Tensor, target: torch.Tensor, lr: torch.Tensor,
        ln_weight: torch.Tensor, ln_bias: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        return k, (k @ weights[0] - target) * lr[..., None]

    def outputs(
        self, weights: Tensors, slots: Tensors, visible: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        k, g = slots
        return _layer(q, weights[0], k, g, visible)

    def slot_widths(self, weights: Tensors) -> tuple[int, ...]:
        width = weights[0].shape[-1]
        return width, width


class PlainMlp(PlainModel):
    """``f(x) = gelu(x W1) W2`` with the tanh approximation of GELU."""

    name, num_weights, num_slots = "ttt-mlp", 2, 4

    def slots(
        self, weights: Tensors, k: torch.Tensor, target: torch.Tensor, lr: torch.Tensor,
        ln_weight: torch.Tensor, ln_bias: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        w1, w2 = weights
        z = k @ w1
        hidden = functional.gelu(z, approximate="tanh")
        g2 = (hidden @ w2 - target) * lr[..., None]
        return k, (g2 @ w2.transpose(-1, -2)) * gelu_derivative(z), hidden, g2

    def outputs(
        self, weights: Tensors, slots: Tensors, visible: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        w1, w2 = weights
        k, g1, x2, g2 = slots
        hidden = functional.gelu(_layer(q, w1, k, g1, visible), approximate="tanh")
        return _layer(hidden, w2, x2, g2, visible)

    def slot_widths(self, weights: Tensors) -> tuple[int, ...]:
        width, hidden = weights[0].shape[-2:]
        return width, hidden, hidden, width


def _layer(
    x: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor, gradients: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``x W_i`` under each query's own weights; visible: ``[B, 1, n, b]``."""
    return x @ weight - ((x @ inputs.transpose(-1, -2)) * visible) @ gradients


PLAIN: dict[str, PlainModel] = {"ttt-linear": PlainLinear(), "ttt-mlp": PlainMlp()}


def plain_fast_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lr: torch.Tensor,
    *,
    inner: PlainModel,
    weights: Tensors,
    token_scale: torch.Tensor,
    initial_state: FastWeightState | Tensors | None = None,
    output_final_state: bool = False,
    attention_mask: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, FastWeightState | None]:
    """Sequence layer whose hidden state is a model without norm, trained on the tokens it reads.

    Token i of a mini-batch that starts with weights P is answered by ``f(q_i; P_i)`` with
    ``P_i = P − s_i Σ_(j≤i) lr_j ∂/∂P ½‖f(k_j; P) − v_j‖²``; the last ones start the next.

    Args:
        q: ``[B, T, H, D]``, any float dtype; k, v alike.
        lr: ``[B, T, H]``.
        weights: where a sequence begins: ``(W [H, D, D],)``, or ``(W1 [H, D, F], W2 [H, F, D])``.
        token_scale: s, ``[b]``.
        initial_state: a state of an earlier call, of B rows, or weights ``[B, H, ...]`` alone.
        attention_mask: ``[B, T]``, zero for padding, whose output is zero.
        causal: ``False``: every token is answered by the mini-batch's last weights.

    Returns:
        ``[B, T, H, D]`` in q's dtype, and the final state (float32 inside) or ``None``.

    Raises:
        OperatorInputError: a state of another layer or batch.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, _, heads, width = q.shape
    rows = check_rows(inner.name, q, attention_mask, None)
    start = tuple(weight.to(dtype).expand(batch, *weight.shape) for weight in weights)
    if initial_state is not None:
        expected = [tuple(weight.shape) for weight in start]
        size = token_scale.shape[0]
        if isinstance(initial_state, FastWeightState):
            given, size = initial_state.weights, initial_state.mini_batch_size
        else:
            given = initial_state
        found = [tuple(weight.shape) for weight in given]
        if found != expected or size != token_scale.shape[0]:
            raise OperatorInputError(
                f"{inner.name}: expected a state with weights {expected} and mini-batches of "
                f"{token_scale.shape[0]}, found {found} and {size}; a "
                "state fits only the model and batch that made it"
            )
    unused = q.new_zeros(heads, width)

    return run_operator(
        inner,
        lambda *arguments: run_mini_batches(inner, *arguments),
        Tokens(q, k, v, lr),
        Shared(token_scale, unused, unused),
        start if initial_state is None else initial_state,
        rows=rows,
        causal=causal,
        output_final_state=output_final_state,
    )
