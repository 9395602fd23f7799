"""What inner loops do while a model reads images: losses and gradients, of every layer.

    with record_inner_loops(model) as recording:
        model(images)
    for layer in recording.layers:
        print(layer.name, layer.losses.shape)

Losses are computed by a second, slower pass in float32; outputs do not change.

Shape legend: B images, S sequence (image and class tokens), N heads, d head width, n tokens of one
mini-batch, J inner steps.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ttt_adapt.errors import ModelError
from ttt_adapt.kernels.inner_loop.models import LinearModel, layer_norm, norm_l2_gradient
from ttt_adapt.vision.mixers import MTTT
from ttt_adapt.vision.models.base import VisionModel
from ttt_adapt.vision.models.inner_learner import InitialState, InnerLearner, InnerTokens
from ttt_adapt.vision.models.layout import TokenLayout


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """One direction of one Vittt block during one call of the model.

    Attributes:
        name: of the module, as in ``named_modules``.
        block: its number, from 0.
        direction: ``forth`` or ``back``.
        losses: ``½‖LN(f(k)) − (v − k)‖²`` of each token under the weights that its mini-batch began
            with, float32 ``[B, N, S]``.
        gradient_norms: Frobenius norms of that loss's gradient by W, ``‖G_t‖`` (equation 6), before
            learning rates, float32 ``[B, N, S]``.
        layout: where class tokens stand. Both arrays are in the image's order, for the back direction
            too, whose inner loop runs from the last token to the first.
    """

    name: str
    block: int
    direction: str
    losses: torch.Tensor
    gradient_norms: torch.Tensor
    layout: TokenLayout


@dataclass(frozen=True, slots=True)
class StepLosses:
    """One MTTT layer during one call of the model.

    Attributes:
        name: of the module, as in ``named_modules``.
        block: its number, from 0.
        losses: the inner loss before each step and after the last, float32 ``[J + 1, B, N]``, in the
            units of the layer's normalizer; of causal strategies each token's, ``[S, B, N]``.
    """

    name: str
    block: int
    losses: torch.Tensor

    @property
    def mean_losses(self) -> torch.Tensor:
        """Summed over heads and averaged over images, ``[J + 1]``, as the public code reports it."""
        return self.losses.sum(-1).mean(-1)


LayerRecord = TokenLosses | StepLosses


class Recording:
    """What :func:`record_inner_loops` has seen: one record for each inner loop and call, in order."""

    def __init__(self) -> None:
        self.layers: list[LayerRecord] = []

    def clear(self) -> None:
        """Forget what has been recorded, to go on with another batch."""
        self.layers.clear()


@contextmanager
def record_inner_loops(model: VisionModel) -> Iterator[Recording]:
    """Record the inner loops of a Vision-TTT or MTTT model while inside; the model is left as found.

    Raises:
        ModelError: the model has none.
    """
    recording = Recording()
    with ExitStack() as undo:
        found = 0
        for block, module in enumerate(model.blocks):
            for place, part in module.named_modules():
                name = f"blocks.{block}.{place}"
                note: Any
                if isinstance(part, InnerLearner):
                    attribute, note = "probe", _token_probe(recording, name, block)
                elif isinstance(part, MTTT):
                    attribute, note = "recorder", _step_recorder(recording, name, block)
                else:
                    continue
                found += 1
                undo.callback(setattr, part, attribute, getattr(part, attribute))
                setattr(part, attribute, note)
        if not found:
            raise ModelError(
                f"{model.architecture or model.family}: expected a model with inner loops "
                "(Vision-TTT, MTTT) to record, found none in it"
            )
        # Checkpointing would run blocks, and so record them, twice.
        undo.callback(model.set_grad_checkpointing, model.grad_checkpointing)
        model.set_grad_checkpointing(False)
        yield recording


@torch.no_grad()
def token_losses(
    learner: InnerLearner, tokens: InnerTokens, initial: InitialState
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient norms of each token in a direction's own order, ``[B, N, S]`` each."""
    dtype = torch.promote_types(tokens.k.dtype, torch.float32)
    inner, size = LinearModel(), learner.mini_batch_size
    rows = tokens.k.shape[0]
    weights = tuple(
        part.to(dtype).expand(rows, *part.shape) for part in (initial.weight, initial.bias)
    )
    norm_weight, norm_bias = learner.norm_weight.to(dtype), learner.norm_bias.to(dtype)
    fold = learner.token_scale().to(dtype)[-1].expand(rows)
    losses, norms = [], []
    with torch.autocast(tokens.k.device.type, enabled=False):
        for first in range(0, tokens.k.shape[1], size):
            k, v, lr = (
                part[:, first : first + size].to(dtype).transpose(1, 2) for part in tokens[1:]
            )
            target = inner.target(k, v)
            z = k @ weights[0] + weights[1][:, :, None]
            error = layer_norm(z, norm_weight, norm_bias) - target
            gradient = norm_l2_gradient(z, target, norm_weight, norm_bias)
            losses.append(0.5 * error.square().sum(-1))
            # G = kᵀ g: the norm of an outer product.
            norms.append(k.norm(dim=-1) * gradient.norm(dim=-1))
            # Only a last mini-batch is shorter, and nothing comes after it.
            weights = inner.fold(weights, (k, gradient * lr[..., None]), fold)
    return torch.cat(losses, dim=2), torch.cat(norms, dim=2)


def _token_probe(
    recording: Recording, name: str, block: int
) -> Callable[[InnerLearner, InnerTokens, InitialState, TokenLayout], None]:
    direction = name.rsplit(".", 1)[-1]

    def note(
        learner: InnerLearner, tokens: InnerTokens, initial: InitialState, layout: TokenLayout
    ) -> None:
        losses, norms = token_losses(learner, tokens, initial)
        if direction == "back":
            losses, norms, layout = losses.flip(2), norms.flip(2), layout.reversed()
        recording.layers.append(TokenLosses(name, block, direction, losses, norms, layout))

    return note


def _step_recorder(recording: Recording, name: str, block: int) -> Callable[[torch.Tensor], None]:
    def note(losses: torch.Tensor) -> None:
        recording.layers.append(StepLosses(name, block, losses.detach().float()))

    return note
