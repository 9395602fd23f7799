"""Train a small language model, from scratch or further, on a mixture of corpora.

The output folder is a model directory that ``transformers`` loads (``config.json``,
``model.safetensors`` in half precision, tokenizer) with ``README.md`` (the model card),
``pretrain.toml`` (resolved settings), ``loss.csv`` and ``loss.json`` beside it; what is needed to
resume lies in its ``tokens/`` and ``checkpoints/``. Started again, the same command continues, and
on a CPU its result equals, bit for bit, that of an uninterrupted run with as many threads.
"""

import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ttt_adapt.adaptation.attention import dense_attention
from ttt_adapt.config import PretrainSettings, to_toml
from ttt_adapt.corpus.files import locate
from ttt_adapt.errors import AdaptationError, CorpusError, SettingsError
from ttt_adapt.layers import TTTLayer
from ttt_adapt.runtime import keep_freed_memory
from ttt_adapt.storage import atomic_write, stable_hash
from ttt_adapt.training.building import (
    build_model,
    build_optimizers,
    inner_base_lr,
    load_initial_weights,
    obtain_tokenizer,
)
from ttt_adapt.training.card import last_validation_loss, write_model
from ttt_adapt.training.checkpoint import load_checkpoint, save_checkpoint
from ttt_adapt.training.distributed import World, joined_world
from ttt_adapt.training.mixture import Mixture, packed_blocks, prepare_mixture, under
from ttt_adapt.training.schedule import learning_rate_factor
from ttt_adapt.training.stopping import StopRequest

# What may change between a checkpoint and its continuation: how long and how often, not what.
EXTENSIBLE = (
    "name",
    "data_description",
    "num_tokens",
    "decay_fraction",
    "warmup_fraction",
    "validate_every",
    "validation_batches",
    "checkpoint_every",
)
# Under a schedule that falls all the way, how long decides every step.
BUDGET = ("num_tokens", "decay_fraction", "warmup_fraction")


@dataclass(frozen=True)
class PretrainResult:
    """What a finished (or, with ``stop_after``, interrupted) pretraining run reports.

    Attributes:
        folder: the model directory.
        num_steps: outer steps done in total.
        num_tokens: tokens trained on in total.
        validation_loss_nats: mean loss per token at the last validation; NaN without one.
        finished: whether the token budget is spent and the model written.
        elapsed_s: seconds of training in total, over all sessions.
        leads: whether this is the first of the processes that trained together: it wrote the files,
            and it alone knows the validation loss.
    """

    folder: Path
    num_steps: int
    num_tokens: int
    validation_loss_nats: float
    finished: bool
    elapsed_s: float
    leads: bool = True


def pretrain(
    settings: PretrainSettings,
    folder: Path,
    *,
    data_root: Path = Path(),
    stop_after: int | None = None,
    report: Callable[[str], None] = print,
) -> PretrainResult:
    """Train, or continue training, the model described by ``settings`` into ``folder``.

    Args:
        settings: architecture, mixture and schedule.
        folder: output directory; made if missing, continued if it holds checkpoints.
        data_root: where relative source paths start.
        stop_after: save and return after this many outer steps (to spread a run over sessions).
        report: receives one line of progress at a time.

    Raises:
        CorpusError: a source cannot be read or is empty.
        FingerprintMismatchError: ``folder`` holds a run with other settings.
        AdaptationError: the loss became NaN or infinite.
        KeyboardInterrupt: on Ctrl-C, after the step and a checkpoint; on another at once.
        SettingsError: a batch has fewer sequences than there are processes.
    """
    keep_freed_memory()
    with joined_world() as world:
        return _pretrain(settings, folder, data_root, stop_after, report, world)


def _pretrain(
    settings: PretrainSettings,
    folder: Path,
    data_root: Path,
    stop_after: int | None,
    report: Callable[[str], None],
    world: World,
) -> PretrainResult:
    if settings.batch_size < world.size:
        raise SettingsError(
            f"batch_size: expected a sequence for each of {world.size} processes, found "
            f"{settings.batch_size}; start fewer processes or take larger batches"
        )
    say = report if world.leads else _say_nothing
    folder.mkdir(parents=True, exist_ok=True)
    if not world.leads:
        world.barrier()  # until the files are there
    tokenizer = obtain_tokenizer(settings, folder, data_root, say)
    mixture = prepare_mixture(settings, folder / "tokens", tokenizer, root=data_root, report=say)
    if world.leads:
        world.barrier()
    run = _Run(settings, folder, mixture, say, world)
    run.train(stop_after)
    finished = run.step >= run.num_steps
    if finished and world.leads:
        run.write_losses()
        write_model(run.model, tokenizer, settings, mixture, run.losses, run.elapsed_s, folder)
    world.barrier()
    return PretrainResult(
        folder=folder,
        num_steps=run.step,
        num_tokens=run.step * run.tokens_per_step,
        validation_loss_nats=last_validation_loss(run.losses),
        finished=finished,
        elapsed_s=run.elapsed_s,
        leads=world.leads,
    )


def plan_pretraining(settings: PretrainSettings, data_root: Path = Path()) -> dict[str, Any]:
    """What a run would do, without reading or training: sizes, steps and memory.

    Raises:
        CorpusError: a source's file is missing.
    """
    for source in (*settings.sources, *settings.validation):
        try:
            locate(under(source, data_root))
        except CorpusError as error:
            raise CorpusError(f"{error}; --data-root names the data's folder") from None
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in build_model(settings, 0).parameters())
    tokens_per_step = settings.batch_size * settings.max_length
    logits = settings.micro_batch_size * settings.max_length * settings.vocab_size
    return {
        "num_parameters": num_parameters,
        "num_steps": max(1, settings.num_tokens // tokens_per_step),
        "num_tokens": settings.num_tokens,
        "tokens_per_step": tokens_per_step,
        "model_bytes": 2 * num_parameters,
        # Weights, gradients, two moments, and logits with their gradient, in float32.
        "memory_bytes": 16 * num_parameters + 8 * logits,
    }


def run_key(settings: PretrainSettings, mixture: Mixture) -> str:
    """What a checkpoint and the run that continues it must agree on."""
    extensible = set(EXTENSIBLE)
    if settings.schedule == "cosine" or settings.base_lr_start is not None:
        extensible -= set(BUDGET)
    values = {k: v for k, v in settings.identity().items() if k not in extensible}
    return stable_hash({"settings": values, "tokens": mixture.description["files"]})


class _Run:
    """The state of one training run."""

    def __init__(
        self,
        settings: PretrainSettings,
        folder: Path,
        mixture: Mixture,
        report: Callable[[str], None],
        world: World,
    ) -> None:
        self.settings, self.folder, self.mixture, self.report = settings, folder, mixture, report
        self.world, self.device = world, world.device
        self.model = build_model(settings, settings.seed).to(self.device).train()
        self.optimizers = build_optimizers(settings, self.model)
        self.tokens_per_step = settings.batch_size * settings.max_length
        self.num_steps = max(1, settings.num_tokens // self.tokens_per_step)
        self.key = run_key(settings, mixture)
        self.step, self.elapsed_s = 0, 0.0
        self.losses: list[dict[str, float]] = []
        state = load_checkpoint(folder / "checkpoints", self.model, self.optimizers, key=self.key)
        if state:
            self.step, self.losses = state["step"], state["losses"]
            self.elapsed_s = state["elapsed_s"]
            report(f"continuing after step {self.step} of {self.num_steps}")
        elif settings.initial_model:
            load_initial_weights(self.model, settings)
        _, self.block = packed_blocks(mixture.train, settings.max_length, settings.seed)
        self.first_block = settings.skip_tokens // settings.max_length
        if world.leads:
            (folder / "pretrain.toml").write_text(to_toml(settings) + "\n", encoding="utf-8")

    def train(self, stop_after: int | None) -> None:
        last = self.num_steps if stop_after is None else min(self.num_steps, stop_after)
        started_s, first, clock = self.elapsed_s, self.step, time.monotonic()
        stop = StopRequest(self.report)
        with stop.listening():
            while self.step < last:
                loss = self._outer_step()
                self.step += 1
                self.elapsed_s = started_s + time.monotonic() - clock
                self._note(loss)
                # All processes stop after the same step.
                stops = self.world.total(float(stop.asked)) > 0
                if self.step % self.settings.checkpoint_every == 0 or self.step == last or stops:
                    self.save()
                if self.step % 10 == 0 or self.step == last:
                    rate = (self.step - first) / (self.elapsed_s - started_s)
                    validation = last_validation_loss(self.losses)
                    known = not math.isnan(validation)
                    self.report(
                        f"step {self.step}/{self.num_steps}  loss {loss:.3f}  "
                        + (f"validation {validation:.3f}  " if known else "")
                        + f"{rate * self.tokens_per_step:,.0f} tokens/s  "
                        f"{(self.num_steps - self.step) / rate / 60:.0f} min left"
                    )
                if stops:
                    self.report(
                        f"interrupted: saved after step {self.step}; the same command continues"
                    )
                    raise KeyboardInterrupt

    def _note(self, loss: float) -> None:
        """A row of the loss curve, with a validation where one is due."""
        row = {"step": self.step, "train_loss_nats": loss, "elapsed_s": self.elapsed_s}
        self.losses.append(row)
        if self.step % self.settings.validate_every == 0 or self.step == self.num_steps:
            if self.world.leads:
                row["validation_loss_nats"] = self._validate()
                self.write_losses()
            self.world.barrier()

    def save(self) -> None:
        if not self.world.leads:
            return
        save_checkpoint(
            self.folder / "checkpoints",
            self.step,
            self.model,
            self.optimizers,
            {"key": self.key, "losses": self.losses, "elapsed_s": self.elapsed_s},
        )
        self.write_losses()

    def _outer_step(self) -> float:
        settings = self.settings
        factor = learning_rate_factor(
            self.step,
            self.num_steps,
            warmup_fraction=settings.warmup_fraction,
            decay_fraction=settings.decay_fraction,
            schedule=settings.schedule,
            final_factor=settings.final_learning_rate / settings.learning_rate,
        )
        self._warm_inner_rate()
        first = self.first_block + self.step * settings.batch_size
        mine = range(self.world.rank, settings.batch_size, self.world.size)
        blocks = [self.block(first + position) for position in mine]
        total = 0.0
        for micro in _batched(blocks, settings.micro_batch_size):
            loss = self._loss(torch.from_numpy(np.stack(micro)), self._length())
            share = len(micro) / settings.batch_size
            torch.autograd.backward(loss * share)
            total += float(loss.detach()) * share
        total = self.world.total(total)
        self.world.sum_gradients(self.model.parameters())
        if not math.isfinite(total):
            raise AdaptationError(
                f"the training loss became {total} at step {self.step}; lower learning_rate "
                "and start again from the last checkpoint"
            )
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), settings.max_grad_norm, error_if_nonfinite=True
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _warm_inner_rate(self) -> None:
        for layer in self.model.modules():
            if isinstance(layer, TTTLayer):
                full = self.settings.base_lr or layer.default_base_lr
                layer.base_lr = inner_base_lr(self.settings, self.step, self.num_steps, full)

    def _length(self) -> int:
        """Tokens per sequence now: short ones until the rate falls."""
        decay_from = self.num_steps - max(1, round(self.num_steps * self.settings.decay_fraction))
        early = self.settings.early_length
        return early if early and self.step < decay_from else self.settings.max_length

    def _loss(self, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """Mean cross-entropy in nats of int64 blocks ``[batch, max_length + 1]``, cut to length."""
        blocks = blocks.to(self.device)
        inputs, targets = blocks[:, :-1].reshape(-1, length), blocks[:, 1:].reshape(-1)
        precise = self.settings.precision == "float32"
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=not precise),
            dense_attention(self.model),
        ):
            logits = self.model(input_ids=inputs).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets)

    @torch.no_grad()
    def _validate(self) -> float:
        length = self.settings.max_length
        num_blocks = (len(self.mixture.validation) - 1) // length
        if num_blocks < 1:
            return math.nan
        num_wanted = self.settings.validation_batches * self.settings.micro_batch_size
        starts = np.linspace(0, num_blocks - 1, min(num_blocks, num_wanted)).astype(int) * length
        blocks = [self.mixture.validation[s : s + length + 1].astype(np.int64) for s in starts]
        self.model.eval()
        total = sum(
            float(self._loss(torch.from_numpy(np.stack(micro)), length)) * len(micro)
            for micro in _batched(blocks, self.settings.micro_batch_size)
        )
        self.model.train()
        return total / len(blocks)

    def write_losses(self) -> None:
        columns = ["step", "train_loss_nats", "validation_loss_nats", "elapsed_s"]
        with atomic_write(self.folder / "loss.csv", "w") as stream:
            writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
            writer.writeheader()
            for row in self.losses:
                writer.writerow({k: v if k == "step" else f"{v:.5g}" for k, v in row.items()})


def _say_nothing(_: str) -> None:
    """What the processes report that don't lead."""


def _batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
