"""Train a vision model: seeded, resumable to the bit on a CPU, in one process or several.

The output folder is a model directory (``config.json``, ``model.safetensors``; with a running average
also ``average/``) with ``train.toml`` (resolved settings), ``history.csv`` and ``result.json`` beside
it; what is needed to resume lies in its ``checkpoints/``. Started again, the same command continues.

Shape legend: B images, C channels, H W pixels, K classes.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import AdaptationError, SettingsError
from ttt_adapt.runtime import derived_seed, keep_freed_memory, versions
from ttt_adapt.settings import to_toml
from ttt_adapt.storage import atomic_write, write_json
from ttt_adapt.training.checkpoint import load_checkpoint, save_checkpoint
from ttt_adapt.training.schedule import learning_rate_factor
from ttt_adapt.training.stopping import StopRequest
from ttt_adapt.vision.data.batches import (
    Batch,
    TrainingBatches,
    evaluation_batches,
    open_images,
)
from ttt_adapt.vision.data.mixing import mix, smooth_targets
from ttt_adapt.vision.training.building import build_model
from ttt_adapt.vision.training.evaluation import Classification, classify
from ttt_adapt.vision.training.history import History
from ttt_adapt.vision.training.optimizer import WeightAverage, build_optimizer
from ttt_adapt.vision.training.planning import num_steps, run_key
from ttt_adapt.vision.training.settings import VisionTrainSettings

SETTINGS_FILE, RESULT_FILE = "train.toml", "result.json"
Progress = Callable[[int, int, str], None]
"""Receives steps done, steps in all, and what to say about it."""


@dataclass(frozen=True)
class VisionTrainResult:
    """What a finished (or, with ``stop_after``, interrupted) run reports.

    Attributes:
        folder: the model directory.
        num_steps: outer steps done in total.
        finished: whether these were all and the model is written.
        validation: of the model, at the last validation; ``None`` before one.
        average: of the running average of its weights; ``None`` without one.
        elapsed_s: seconds of training, over all sessions.
    """

    folder: Path
    num_steps: int
    finished: bool
    validation: Classification | None
    average: Classification | None
    elapsed_s: float


def train(
    settings: VisionTrainSettings,
    folder: Path,
    *,
    device: str = "auto",
    stop_after: int | None = None,
    report: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> VisionTrainResult:
    """Train, or continue training, the model described by ``settings`` into ``folder``.

    Args:
        device: ``auto`` (a GPU where there is one) or ``cpu``; processes that ``accelerate launch``
            or ``torchrun`` started share every batch.
        stop_after: save and return after this many outer steps.
        report: receives one line at a time.

    Raises:
        ImageError: images cannot be read.
        ModelError: no such model, or one that the images don't fit.
        SettingsError: an unknown device.
        FingerprintMismatchError: ``folder`` holds a run with other settings.
        AdaptationError: the loss became NaN or infinite.
        KeyboardInterrupt: on Ctrl-C, after the step and a checkpoint; on another at once.
    """
    if device not in {"auto", "cpu"}:
        raise SettingsError(f"device: expected auto or cpu to train on, found {device!r}")
    keep_freed_memory()
    accelerator = Accelerator(mixed_precision="no", cpu=device == "cpu")
    say = report if accelerator.is_main_process else _say_nothing
    run = _Run(settings, folder, accelerator, say, progress)
    run.train(stop_after)
    finished = run.step >= run.num_steps
    if finished:
        run.write_model()
    accelerator.wait_for_everyone()
    return VisionTrainResult(
        folder, run.step, finished, run.validation, run.average_validation, run.elapsed_s
    )


class _Run:
    """The state of one training run."""

    def __init__(
        self,
        settings: VisionTrainSettings,
        folder: Path,
        accelerator: Accelerator,
        report: Callable[[str], None],
        progress: Progress | None,
    ) -> None:
        self.settings, self.folder, self.accelerator = settings, folder, accelerator
        self.report, self.progress, self.device = report, progress, accelerator.device
        self.rank, self.num_processes = accelerator.process_index, accelerator.num_processes
        training = open_images(settings.data, training=True, seed=settings.seed)
        self.held_out = open_images(settings.data)
        self.classes = tuple(training.classes)
        self.batches = TrainingBatches(
            training,
            settings.data,
            settings.augmentation,
            batch_size=settings.batch_size,
            seed=settings.seed,
            rank=self.rank,
            num_processes=self.num_processes,
            num_workers=settings.num_workers,
        )
        self.num_steps = num_steps(settings, self.batches.steps_per_epoch)
        self.model = build_model(settings, len(self.classes)).to(self.device).train()
        self.optimizer = build_optimizer(self.model, settings)
        self.average = WeightAverage(self.model, settings.ema_decay) if settings.ema_decay else None
        self.step, self.elapsed_s = 0, 0.0
        self.recent: list[float] = []
        self.validation: Classification | None = None
        self.average_validation: Classification | None = None
        self.history = History(folder)
        self.key = run_key(settings, self.classes, len(training))
        state = load_checkpoint(
            folder / "checkpoints", self._kept(), [self.optimizer], key=self.key
        )
        if state:
            self.step, self.elapsed_s = state["step"], state["elapsed_s"]
            self.history.rows, self.history.inner_losses = state["rows"], state["inner_losses"]
            self.recent = state["recent"]
            report(f"continuing after step {self.step} of {self.num_steps}")
        self.shared, self.stepper = accelerator.prepare(self.model, self.optimizer)
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / SETTINGS_FILE, "w") as stream:
                stream.write(to_toml(settings) + "\n")

    def train(self, stop_after: int | None) -> None:
        last = self.num_steps if stop_after is None else min(self.num_steps, stop_after)
        if self.step >= last:
            self._validate()
            return
        batches = self.batches.starting_at(self.step)
        clock, before, first = time.monotonic(), self.elapsed_s, self.step
        if self.step == 0:
            self._record_inner_losses()
        stop = StopRequest(self.report)
        with stop.listening():
            while self.step < last:
                rate = self._rate()
                self.recent.append(self._outer_step(batches, rate))
                self.step += 1
                self.elapsed_s = before + time.monotonic() - clock
                self._note(rate)
                stops = self._agreed(stop.asked)
                if self.step % self.settings.checkpoint_every == 0 or self.step == last or stops:
                    self.save()
                if self.progress is not None:
                    self.progress(self.step, self.num_steps, self.settings.name)
                if self.step % self.settings.log_every == 0 or self.step == last:
                    self._tell((self.step - first) / max(1e-9, self.elapsed_s - before))
                if stops:
                    self.report(
                        f"interrupted: saved after step {self.step}; the same command continues"
                    )
                    raise KeyboardInterrupt

    def _agreed(self, asked: bool) -> bool:
        """Whether any process was asked to stop: all of them do, after the same step."""
        if self.num_processes == 1:
            return asked
        told = torch.tensor(float(asked), device=self.device)
        return bool(self.accelerator.reduce(told, reduction="sum") > 0)

    def _note(self, rate: float) -> None:
        """A row of the history where one is due, with a validation where that is."""
        every = self.settings.validate_every or self.batches.steps_per_epoch
        validates = self.step % every == 0 or self.step == self.num_steps
        if self.step % self.settings.log_every and not validates:
            return
        row = {"step": self.step, "train_loss_nats": fmean(self.recent)}
        row |= {"learning_rate": rate, "elapsed_s": self.elapsed_s}
        row["epoch"] = self.step / self.batches.steps_per_epoch
        self.recent = []
        if validates:
            row |= self._validate()
        self.history.rows.append(row)

    def _tell(self, speed: float) -> None:
        """Where the run is, at ``speed`` steps a second."""
        top1 = self.validation.top1 if self.validation else math.nan
        self.report(
            f"step {self.step}/{self.num_steps}  "
            f"loss {self.history.last('train_loss_nats'):.3f}  top-1 {100 * top1:.1f} %  "
            f"{speed * self.settings.batch_size:,.0f} images/s  "
            f"{(self.num_steps - self.step) / speed / 60:.0f} min left"
        )

    def save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {"key": self.key, "elapsed_s": self.elapsed_s, "rows": self.history.rows}
        state |= {"inner_losses": self.history.inner_losses, "recent": self.recent}
        save_checkpoint(
            self.folder / "checkpoints", self.step, self._kept(), [self.optimizer], state
        )
        self.history.write()

    def write_model(self) -> None:
        """What remains of a finished run."""
        if not self.accelerator.is_main_process:
            return
        self.history.write()
        saved: Any = self.model
        saved.save_pretrained(self.folder)
        if self.average is not None:
            averaged: Any = self.average.model
            averaged.save_pretrained(self.folder / "average")
        found = {
            "name": self.settings.name,
            "num_steps": self.step,
            "elapsed_s": self.elapsed_s,
            "validation": self.validation and asdict(self.validation),
            "average": self.average_validation and asdict(self.average_validation),
            "classes": list(self.classes),
            "versions": versions(),
        }
        write_json(self.folder / RESULT_FILE, found)

    def _kept(self) -> nn.Module:
        """Everything with weights, under names that a checkpoint keeps apart."""
        average = {} if self.average is None else {"average": self.average.model}
        return nn.ModuleDict({"weights": self.model, **average})

    def _rate(self) -> float:
        settings = self.settings
        warmup = settings.warmup_steps + settings.warmup_epochs * self.batches.steps_per_epoch
        return settings.learning_rate * learning_rate_factor(
            self.step,
            self.num_steps,
            warmup_fraction=warmup / self.num_steps,
            decay_fraction=1.0,
            schedule="cosine",
            final_factor=settings.final_learning_rate / settings.learning_rate,
        )

    def _outer_step(self, batches: Iterator[Batch], rate: float) -> float:
        settings, accelerator = self.settings, self.accelerator
        # What a step draws follows from its number, so that it can be done again.
        torch.manual_seed(derived_seed(settings.seed, "step", self.step, self.rank))
        generator = np.random.default_rng(
            derived_seed(settings.seed, "mixing", self.step, self.rank)
        )
        images, labels = (tensor.to(self.device) for tensor in next(batches))
        targets = smooth_targets(labels, len(self.classes), settings.label_smoothing)
        images, targets = mix(images, targets, settings.augmentation, generator)
        size = settings.micro_batch_size or len(images)
        starts = range(0, len(images), size)
        total = torch.zeros((), device=self.device)
        for start in starts:
            part = slice(start, start + size)
            share = len(images[part]) / len(images)
            if start != starts[-1]:
                with accelerator.no_sync(self.shared):
                    total += self._learn(images[part], targets[part], share)
            else:
                total += self._learn(images[part], targets[part], share)
        loss = float(accelerator.reduce(total, reduction="mean"))
        if not math.isfinite(loss):
            raise AdaptationError(
                f"the training loss became {loss} at step {self.step}; lower learning_rate and "
                "start again from the last checkpoint"
            )
        if settings.max_grad_norm is not None:
            accelerator.clip_grad_norm_(self.shared.parameters(), settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model, self.step + 1)
        return loss

    def _learn(
        self, images_BCHW: torch.Tensor, targets_BK: torch.Tensor, share: float
    ) -> torch.Tensor:
        precise = self.settings.precision == "float32"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not precise):
            logits = self.shared(images_BCHW)
        loss = functional.cross_entropy(logits.float(), targets_BK) * share
        self.accelerator.backward(loss)
        return loss.detach()

    def _validate(self) -> dict[str, float]:
        self._record_inner_losses()
        self.validation = self._classified(self.model)
        row = {
            "validation_loss_nats": self.validation.loss_nats,
            "top1": self.validation.top1,
            "top5": self.validation.top5,
        }
        if self.average is not None:
            self.average_validation = self._classified(self.average.model)
            row["average_top1"] = self.average_validation.top1
        return row

    def _classified(self, model: nn.Module) -> Classification:
        def total(sums: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = self.accelerator.reduce(sums, reduction="sum")
            return summed

        batches = evaluation_batches(
            self.held_out,
            self.settings.data,
            batch_size=self._validation_batch(),
            rank=self.rank,
            num_processes=self.num_processes,
            num_workers=self.settings.num_workers,
        )
        return classify(
            model, batches, device=self.device, precision=self.settings.precision, total=total
        )

    def _validation_batch(self) -> int:
        return self.settings.micro_batch_size or max(
            1, self.settings.batch_size // self.num_processes
        )

    def _record_inner_losses(self) -> None:
        wanted = min(self.settings.record_inner_losses, len(self.held_out))
        if not wanted or not self.accelerator.is_main_process:
            return
        from ttt_adapt.vision.explaining import inner_losses

        batches = evaluation_batches(self.held_out, self.settings.data, batch_size=wanted)
        curves = inner_losses(self.model, next(batches)[0].to(self.device))
        self.history.inner_losses.append(
            {"step": self.step, "layers": [curve.losses.tolist() for curve in curves]}
        )


def _say_nothing(_: str) -> None:
    """What the processes report that don't lead."""
