"""Learning on one query: a step per chunk, each state verified before anyone sees it.

A state of the weights counts as good once a loss and gradients computed with it are finite and
the loss has not exploded.
That costs nothing between steps, where the next chunk's loss is needed anyway and is computed
before the state is handed out; only the last state of a query takes one more forward pass.
"""

import contextlib
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

from ttt_adapt.adaptation.attention import dense_attention
from ttt_adapt.adaptation.chunks import Curriculum
from ttt_adapt.adaptation.plastic import PlasticWeights
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.models.language_model import position_limit
from ttt_adapt.types import Learned

LENGTHS = 64
"""Tokens that lengths are rounded up to, where oneDNN computes."""
IGNORED = -100
"""A target that counts for nothing."""
_Gradients = tuple[torch.Tensor | None, ...]


class QueryLearning:
    """Learns from a curriculum up to a requested step, and can be asked again for a later one.

    Attributes:
        stopped: empty, or why learning ended (``nan``, ``exploded``).
    """

    def __init__(
        self,
        model: nn.Module,
        weights: PlasticWeights,
        optimizer: torch.optim.Optimizer,
        curriculum: Curriculum,
        settings: AdaptationSettings,
        *,
        last_step: int,
        autocast: bool,
        vocabulary: int,
    ) -> None:
        self._model, self._weights, self._optimizer = model, weights, optimizer
        self._curriculum, self._settings = curriculum, settings
        self._num_chunks = curriculum.num_chunks(last_step)
        self._autocast = autocast
        self._uniform_nats = math.log(vocabulary)
        self._losses: list[float] = []
        self._applied = 0
        self._verified = True
        self._ready: _Gradients | None = None
        self._elapsed_s = 0.0
        self.stopped = ""

    def advance(self, step: int) -> int:
        """Learn until ``step`` passages are done, data end or learning is stopped.

        Returns:
            The number of passages wholly learned from in the weights as they now are.
        """
        begin = time.perf_counter()
        # The caller's grad or inference mode is its own; autograd is needed here only.
        with torch.inference_mode(False), torch.enable_grad():
            target = min(self._curriculum.num_chunks(step), self._num_chunks)
            while not self.stopped and self._applied < target:
                self._prepare()
                if not self.stopped:
                    self._apply()
            if not self.stopped and not self._verified:
                if self._applied < self._num_chunks:
                    self._prepare()
                else:
                    self._verify_last()
        self._elapsed_s += time.perf_counter() - begin
        return self._curriculum.passages_done(self._applied, step)

    def learned(self) -> Learned:
        """The record so far."""
        chunks = self._curriculum.chunks[: self._applied]
        return Learned(
            losses_nats=tuple(self._losses),
            num_tokens=sum(len(chunk) - 1 for chunk in chunks),
            stopped=self.stopped,
            elapsed_s=self._elapsed_s,
        )

    def _prepare(self) -> None:
        """Loss and gradients of the next chunk at the present weights, which this verifies."""
        if self._ready is not None:
            return
        loss = self._loss(self._curriculum.chunks[self._applied])
        gradients: _Gradients = torch.autograd.grad(loss, self._weights.leaves, allow_unused=True)
        # Norms of half-precision gradients would be rounded to half precision, and the fused
        # optimizer reads gradients in the order of the contiguous masters, whatever their strides.
        gradients = tuple(None if g is None else g.float().contiguous() for g in gradients)
        used = [g for g in gradients if g is not None]
        norm = torch.nn.utils.get_total_norm(used)
        # One transfer from the device for both numbers.
        loss_nats, norm_value = torch.stack((loss.detach(), norm.float())).tolist()
        if math.isfinite(loss_nats):
            self._losses.append(loss_nats)
        if not self._judge(loss_nats, sound=math.isfinite(norm_value)):
            return
        limit = self._settings.max_grad_norm
        if limit is not None and norm_value > limit:
            # As torch.nn.utils.clip_grad_norm_ has it, on gradients that no parameter holds.
            torch._foreach_mul_(used, limit / (norm + 1e-6))
        self._ready = gradients

    def _apply(self) -> None:
        assert self._ready is not None
        self._weights.keep()
        for master, gradient in zip(self._weights.masters, self._ready, strict=True):
            master.grad = gradient
        self._ready = None
        self._verified = False
        self._applied += 1
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._weights.publish()

    @torch.no_grad()
    def _verify_last(self) -> None:
        loss = self._loss(self._curriculum.chunks[self._applied - 1])
        self._judge(float(loss), sound=self._weights.is_finite())

    def _judge(self, loss_nats: float, *, sound: bool) -> bool:
        """Whether the present weights are good; if not, stop and go back to those that were.

        ``sound`` is whether their norm or their gradients' is finite: weights gone astray can
        still give a finite loss, for normalisation layers turn any number into zero.
        """
        if not (math.isfinite(loss_nats) and sound):
            self.stopped = "nan"
        elif loss_nats > self._limit_nats():
            self.stopped = "exploded"
        if self.stopped and not self._verified:
            self._weights.roll_back()
            self._applied -= 1
        self._verified = True
        return not self.stopped

    def _limit_nats(self) -> float:
        """Never below what guessing every token alike costs: after an easy first chunk, an
        ordinary one can cost many times as much."""
        return max(self._settings.explosion_factor * self._losses[0], self._uniform_nats)

    def _loss(self, chunk: torch.Tensor) -> torch.Tensor:
        with dense_attention(self._model) if self._autocast else contextlib.nullcontext():
            return chunk_loss(self._model, chunk, autocast=self._autocast)


def chunk_loss(model: nn.Module, chunk: torch.Tensor, *, autocast: bool) -> torch.Tensor:
    """Mean nats per token of ``chunk[1:]``, each given the tokens before it; float32 scalar."""
    device = next(model.parameters()).device
    inputs, targets = chunk[:-1], chunk[1:]
    if autocast and device.type == "cpu":
        inputs, targets = whole_rows(inputs, targets, position_limit(model.config))
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=inputs.to(device)[None], use_cache=False).logits[0]
    return F.cross_entropy(logits.float(), targets.to(device), ignore_index=IGNORED)


def whole_rows(
    inputs_T: torch.Tensor, targets_T: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both lengthened to a multiple of :data:`LENGTHS`, or to ``limit`` positions.

    No token sees what comes after it, and what is added has no target: the loss stays. But oneDNN
    writes its bfloat16 kernels anew for each shape, and keeps a thousand of them.
    """
    length = len(inputs_T)
    more = min(-length % LENGTHS, limit - length)
    if more <= 0:
        return inputs_T, targets_T
    ignored = targets_T.new_full((more,), IGNORED)
    return torch.cat((inputs_T, inputs_T[-1:].expand(more))), torch.cat((targets_T, ignored))
