"""One session of a run: steps, records, checkpoints, and a stop that loses nothing."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ttt_adapt.curriculum.prompts import Prompts, fitting_prompts
from ttt_adapt.curriculum.task_files import read_tasks, write_tasks
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.training.history import (
    ReportProgress,
    StepRecord,
    TrainingProgress,
    append_record,
)
from ttt_adapt.curriculum.training.schedule import Reselect, Schedule, within_band
from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.curriculum.training.trainer import CurriculumTrainer, Practice
from ttt_adapt.evaluation.solving import SOLVED
from ttt_adapt.training.checkpoint import load_checkpoint, save_checkpoint
from ttt_adapt.training.stopping import StopRequest

CHECKPOINTS = "checkpoints"
CHOSEN = "curricula"


@dataclass
class RunState:
    """What a run carries from step to step besides weights: all of it JSON.

    Attributes:
        since: step at which the present tasks were chosen; 0: those that were given.
        pass_rates: mean reward of each practised task's last group.
    """

    num_rollouts: int = 0
    num_tokens: int = 0
    num_absent: int = 0
    num_zero_signal: int = 0
    reward: float | None = None
    elapsed_s: float = 0.0
    since: int = 0
    pass_rates: dict[str, float] = field(default_factory=dict)


class PractisedTasks:
    """The tasks being practised: those given, or those chosen since."""

    def __init__(
        self,
        given: Prompts,
        model: Any,
        tokenizer: Any,
        settings: GRPOSettings,
        folder: Path,
        since: int,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.settings, self.folder, self.given = settings, folder, given
        self.present = given
        self._restart(since)
        if since:
            self._adopt(list(read_tasks(self._path(since))), since)

    def practice(self, step: int) -> Practice:
        positions = self.schedule.positions(step)
        tasks, ids = self.present.tasks, self.present.token_ids
        return Practice([tasks[p] for p in positions], [ids[p] for p in positions])

    def choose(self, reselect: Reselect | None, pass_rates: Mapping[str, float], step: int) -> None:
        """Choose anew and write down what was chosen; only one process does this."""
        band = self.settings.band
        chosen: Sequence[Task]
        if reselect is not None:
            chosen = reselect(pass_rates, step=step, band=band)
        else:
            at_least = self.settings.prompts_per_step
            chosen = within_band(self.given.tasks, pass_rates, band=band, at_least=at_least)
        write_tasks(self._path(step), chosen)

    def take_up(self, step: int) -> None:
        """Go on with what :meth:`choose` wrote."""
        self._adopt(list(read_tasks(self._path(step))), step)

    def _adopt(self, tasks: list[Task], since: int) -> None:
        self.present = fitting_prompts(
            self._model,
            self._tokenizer,
            tasks,
            self.settings,
            max_completion_tokens=self.settings.max_completion_tokens,
        )
        self._restart(since)

    def _restart(self, since: int) -> None:
        self.schedule = Schedule(
            len(self.present.tasks),
            prompts_per_step=self.settings.prompts_per_step,
            since=since,
            seed=self.settings.seed,
            shuffled=self.settings.order == "shuffled",
        )

    def _path(self, step: int) -> Path:
        return self.folder / CHOSEN / f"step-{step:08d}.jsonl"


class TrainableWeights(nn.Module):
    """The parameters that learn, under their names in the model: what a checkpoint holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._learning)


class StepKeeper(TrainerCallback):
    """After each step: record, progress, tasks chosen anew, checkpoint, stop if asked to."""

    def __init__(
        self,
        trainer: CurriculumTrainer,
        curriculum: PractisedTasks,
        weights: TrainableWeights,
        state: RunState,
        *,
        key: str,
        num_steps: int,
        progress: ReportProgress | None,
        reselect: Reselect | None,
        stop: StopRequest,
    ) -> None:
        self.trainer, self.curriculum, self.weights, self.state = (
            trainer,
            curriculum,
            weights,
            state,
        )
        self.key, self.num_steps, self.progress = key, num_steps, progress
        self.reselect, self.stop = reselect, stop
        self.first_step, self.saved_step = trainer.first_step, trainer.first_step
        self.began_s = time.monotonic()
        self.before_s = state.elapsed_s

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first_step:
            load_checkpoint(
                self.curriculum.folder / CHECKPOINTS,
                self.weights,
                [kwargs["optimizer"]],
                key=self.key,
            )
        self.began_s = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.drop_empty_update()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """TRL logs once a step, after its last update, when the weights are those of the next."""
        outcome, logs = self.trainer.outcome, kwargs["logs"]
        if outcome is None or "loss" not in logs:
            return
        step = self.trainer.steps_done
        run = self.state
        run.elapsed_s = self.before_s + time.monotonic() - self.began_s
        rewards_GN = outcome.rewards_GN.double()
        known_GN = ~torch.isnan(rewards_GN)
        num_known = int(known_GN.sum())
        run.num_rollouts += rewards_GN.numel()
        run.num_tokens += outcome.num_tokens
        for task_id, mean in zip(outcome.task_ids, rewards_GN.nanmean(dim=1).tolist(), strict=True):
            if not math.isnan(mean):
                run.pass_rates[task_id] = mean
        num_solved = int((rewards_GN >= SOLVED).sum())
        record = StepRecord(
            step=step,
            reward=float(rewards_GN.nansum()) / num_known if num_known else None,
            pass_rate=num_solved / num_known if num_known else None,
            num_groups=len(rewards_GN),
            zero_signal_groups=int((~outcome.signal_G).sum()),
            absent_rewards=rewards_GN.numel() - num_known,
            skipped_updates=outcome.skipped_updates,
            num_rollouts=run.num_rollouts,
            num_tokens=run.num_tokens,
            completion_tokens=float(logs["completions/mean_length"]),
            truncated=float(logs["completions/clipped_ratio"]),
            loss=float(logs["loss"]),
            gradient_norm=logs.get("grad_norm"),
            entropy=logs.get("entropy"),
            clipped=logs.get("clip_ratio/region_mean"),
            kl=logs.get("kl"),
            elapsed_s=run.elapsed_s,
        )
        run.reward = record.reward
        run.num_absent += record.absent_rewards
        run.num_zero_signal += record.zero_signal_groups
        leads = self.trainer.accelerator.is_main_process
        if leads:
            append_record(self.curriculum.folder, record)
        if leads and self.progress is not None:
            pace = (time.monotonic() - self.began_s) / (step - self.first_step)
            self.progress(TrainingProgress(record, self.num_steps, pace * (self.num_steps - step)))
        self._choose_anew(step)
        stopping = self._asked_to_stop()
        if stopping or step == self.num_steps or step % self.curriculum.settings.save_every == 0:
            self.save(step)
        control.should_training_stop = control.should_training_stop or stopping

    def save(self, step: int) -> None:
        """Write a checkpoint after ``step`` steps."""
        if self.trainer.accelerator.is_main_process:
            save_checkpoint(
                self.curriculum.folder / CHECKPOINTS,
                step,
                self.weights,
                [self.trainer.optimizer],
                {"key": self.key, "run": vars(self.state)},
            )
        self.saved_step = step
        self.trainer.accelerator.wait_for_everyone()

    def _choose_anew(self, step: int) -> None:
        every = self.curriculum.settings.reselect_every
        if every is None or step % every or step == self.num_steps:
            return
        if self.trainer.accelerator.is_main_process:
            self.curriculum.choose(self.reselect, self.state.pass_rates, step)
        self.trainer.accelerator.wait_for_everyone()
        self.curriculum.take_up(step)
        self.state.since = step

    def _asked_to_stop(self) -> bool:
        """Whether any process was asked to: all of them stop after the same step."""
        accelerator = self.trainer.accelerator
        asked = torch.tensor([float(self.stop.asked)], device=accelerator.device)
        return bool(accelerator.gather(asked).any())
