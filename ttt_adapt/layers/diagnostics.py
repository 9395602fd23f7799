"""What the inner loops of a model do: losses before and after each step, rates, norms, NaN.

    with diagnose(model) as diagnosis:
        model(input_ids=tokens)
    for layer in diagnosis.layers:
        print(layer.name, layer.loss_before, layer.loss_after, layer.mean_lr, layer.state_norm)

The question of figure 7 of Sun et al. 2024 (arXiv 2407.04620): does the inner loss fall by the step?
Losses are computed by a second, slower pass through the operator; outputs do not change.

Shape legend: B rows, T tokens, H heads, D head width, n tokens of one mini-batch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.models import Tensors, layer_norm
from ttt_adapt.kernels.inner_loop.rows import rows_of_mask, valid_tokens
from ttt_adapt.layers.ttt_layer import InnerTokens, TTTLayer


@dataclass(frozen=True, slots=True)
class LayerDiagnosis:
    """One TTT layer over all forward passes that were watched.

    Attributes:
        name: of the module in the model.
        kind: ``ttt_linear`` or ``ttt_mlp``.
        num_tokens: tokens that the losses are means over; those that complete a mini-batch which
            an earlier pass had opened are not among them.
        loss_before: mean of ``½‖LN(f(k)) − (v − k)‖²`` per token and head, under the parameters that
            the token's mini-batch began with; NaN without tokens.
        loss_after: the same under the parameters after its last token: below ``loss_before`` where
            the step helps.
        mean_lr: of the learning rates ``base_lr · gate / D``.
        state_norm: of the fast weights after the last pass, mean over rows.
        is_finite: whether no NaN or infinity was met; losses leave out passes with one.
    """

    name: str
    kind: str
    num_tokens: int
    loss_before: float
    loss_after: float
    mean_lr: float
    state_norm: float
    is_finite: bool


class Diagnosis:
    """What :func:`diagnose` has seen so far."""

    def __init__(self, names: dict[TTTLayer, str]) -> None:
        self._names = names
        self._sums = {layer: _Sums() for layer in names}

    @property
    def layers(self) -> tuple[LayerDiagnosis, ...]:
        """One entry for each TTT layer, in the model's order."""
        return tuple(
            LayerDiagnosis(
                name,
                layer.kind,
                sums.num_tokens,
                sums.loss_before / (sums.num_tokens or math.nan),
                sums.loss_after / (sums.num_tokens or math.nan),
                sums.lr / (sums.num_lr or math.nan),
                sums.state_norm,
                sums.is_finite,
            )
            for (layer, name), sums in zip(self._names.items(), self._sums.values(), strict=True)
        )

    @property
    def is_finite(self) -> bool:
        """Whether no layer met NaN or infinity."""
        return all(layer.is_finite for layer in self.layers)

    @torch.no_grad()
    def watch(self, layer: TTTLayer, tokens: InnerTokens, fast: FastWeightState | None) -> None:
        """Take note of one pass through a layer; layers call this as their ``probe``."""
        sums = self._sums[layer]
        if not all(bool(tensor.isfinite().all()) for tensor in tokens[:4]):
            sums.is_finite = False
            return
        real = tokens.real
        if real is None:
            real = torch.ones(tokens.lr.shape[:2], dtype=torch.bool, device=tokens.lr.device)
        sums.lr += float(tokens.lr[real].sum()) / layer.num_heads
        sums.num_lr += int(real.sum())
        aligned, weights = _align(layer, tokens, real, fast)
        if aligned is not None:
            weights = _add_losses(sums, layer, aligned, weights)
        squares = sum(tensor.float().square().flatten(1).sum(1) for tensor in weights)
        assert isinstance(squares, torch.Tensor), "an inner model has weights"
        sums.state_norm = float(squares.sqrt().mean())
        sums.is_finite &= math.isfinite(sums.state_norm)


@contextmanager
def diagnose(model: nn.Module) -> Iterator[Diagnosis]:
    """Watch the inner loops of a model's TTT layers while inside.

    Args:
        model: any module that holds :class:`ttt_adapt.layers.TTTLayer`; left as it was found.

    Raises:
        ModelError: it holds none.
    """
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, TTTLayer)}
    if not names:
        raise ModelError("expected a model with TTT layers to diagnose, found none in it")
    diagnosis = Diagnosis(names)
    before = {layer: layer.probe for layer in names}
    for layer in names:
        layer.probe = diagnosis.watch
    try:
        yield diagnosis
    finally:
        for layer, probe in before.items():
            layer.probe = probe


@dataclass(slots=True)
class _Sums:
    """Running sums of one layer; losses are sums over tokens of means over heads."""

    num_tokens: int = 0
    loss_before: float = 0.0
    loss_after: float = 0.0
    num_lr: int = 0
    lr: float = 0.0
    state_norm: float = math.nan
    is_finite: bool = True


def _align(
    layer: TTTLayer, tokens: InnerTokens, real: torch.Tensor, fast: FastWeightState | None
) -> tuple[InnerTokens | None, Tensors]:
    """The tokens from each row's next whole mini-batch on, and the weights it begins with."""
    if fast is None:
        rows = tokens.q.shape[0]
        dtype = torch.promote_types(tokens.q.dtype, torch.float32)
        named = layer.initial_weights().values()
        start = tuple(w.to(dtype).expand(rows, *w.shape) for w in named)
        return tokens._replace(real=real), start
    missing = (layer.mini_batch_size - fast.num_open) % layer.mini_batch_size
    ordinal = real.cumsum(1) - 1
    head, tail = real & (ordinal < missing[:, None]), real & (ordinal >= missing[:, None])
    if bool(head.any()):
        _, state = layer.learn(tokens._replace(real=head), fast, output_final_state=True)
        assert state is not None, "it was asked for"
        fast = state
    if not bool(tail.any()):
        return None, fast.weights
    rows_of_tail = rows_of_mask(tail)
    if rows_of_tail is None:
        return tokens._replace(real=real), fast.weights
    q, k, v, lr = (rows_of_tail.gather(tensor) for tensor in tokens[:4])
    return InnerTokens(q, k, v, lr, rows_of_tail.valid()), fast.weights


def _add_losses(sums: _Sums, layer: TTTLayer, tokens: InnerTokens, weights: Tensors) -> Tensors:
    """Go through aligned rows mini-batch by mini-batch; the weights after each row's last token."""
    assert tokens.real is not None, "aligned rows have one"
    size, lengths = layer.mini_batch_size, tokens.real.sum(1)
    for first in range(0, tokens.q.shape[1], size):
        q, k, v, lr = (tensor[:, first : first + size] for tensor in tokens[:4])
        real = valid_tokens(lengths - first, q.shape[1])
        if not bool(real.any()):
            break
        before = _losses(layer, weights, k, v)
        _, after = layer._operate(
            q,
            k,
            v,
            lr,
            **layer.shared(),
            initial_state=weights,
            output_final_state=True,
            attention_mask=real,
            # Not causal: the weights after the last token, also of a mini-batch that is not full.
            causal=False,
            backend="chunked",
        )
        assert after is not None, "it was asked for"
        weights = after.weights
        sums.num_tokens += int(real.sum())
        sums.loss_before += float(before[real].sum())
        sums.loss_after += float(_losses(layer, weights, k, v)[real].sum())
    return weights


def _losses(
    layer: TTTLayer, weights: Tensors, k_BnHD: torch.Tensor, v_BnHD: torch.Tensor
) -> torch.Tensor:
    """``½‖LN(f(k)) − (v − k)‖²``, or ``½‖f(k) − v‖²`` of plain inner models, mean over heads,
    ``[B, n]``."""
    dtype = weights[0].dtype
    k, v = (tensor.to(dtype).transpose(1, 2) for tensor in (k_BnHD, v_BnHD))
    if not layer.has_inner_norm:
        return 0.5 * (k @ weights[0] - v).square().sum(-1).mean(1)
    z = k @ weights[0] + weights[1][:, :, None]
    if layer.kind == "ttt_mlp":
        hidden = functional.gelu(z, approximate="tanh")
        z = hidden @ weights[2] + weights[3][:, :, None]
    error = layer_norm(z, layer.norm_weight.to(dtype), layer.norm_bias.to(dtype)) - (v - k)
    return 0.5 * error.square().sum(-1).mean(1)
