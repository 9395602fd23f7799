"""Train a language model on a curriculum by reinforcement learning."""

import contextlib
import importlib.util
import json
import logging
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum.padding import check_padding_invariance
from ttt_adapt.curriculum.prompts import Prompts, fitting_prompts
from ttt_adapt.curriculum.tasks import Task, to_json
from ttt_adapt.curriculum.training.arguments import grpo_arguments
from ttt_adapt.curriculum.training.history import ReportProgress, cut_history
from ttt_adapt.curriculum.training.policy import MODEL, with_adapter, write_model
from ttt_adapt.curriculum.training.running import (
    CHECKPOINTS,
    PractisedTasks,
    RunState,
    StepKeeper,
    TrainableWeights,
)
from ttt_adapt.curriculum.training.schedule import Reselect, steps_of_epochs
from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.curriculum.training.trainer import CurriculumTrainer
from ttt_adapt.curriculum.verifying import Verifier
from ttt_adapt.errors import (
    FingerprintMismatchError,
    MissingDependencyError,
    ModelError,
    SettingsError,
    TaskError,
)
from ttt_adapt.models.language_model import LanguageModel
from ttt_adapt.models.loading import load_language_model
from ttt_adapt.runtime import keep_freed_memory, resolve_device
from ttt_adapt.settings import to_toml
from ttt_adapt.storage import atomic_write, remove_orphans, stable_hash, write_json
from ttt_adapt.training.checkpoint import FOLDER, load_checkpoint
from ttt_adapt.training.stopping import StopRequest

RESULT = "result.json"
SETTINGS = "settings.toml"

EXTENSIBLE = {
    "num_steps",
    "epochs",
    "save_every",
    "save_dtype",
    "num_verifiers",
    "device",
    "vllm_memory_share",
    "vllm_server_url",
}
"""Settings that may change when a run is continued: how long, how often, where; not what."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A finished run.

    Attributes:
        folder: of the run: ``model/``, ``history.jsonl``, ``settings.toml``, ``result.json``,
            ``checkpoints/``; with LoRA also ``adapter/``; with tasks chosen anew ``curricula/``.
        model: the trained model, which ``load_language_model`` loads; adapters are merged.
        num_steps: done in total.
        num_rollouts: completions drawn in total.
        num_tokens: of prompts and completions, in total.
        num_absent: completions that could not be verified.
        num_zero_signal: groups that taught nothing.
        too_long: tasks left out for their prompts' length: id and number of tokens.
        elapsed_s: seconds of training, over all sessions.
        reward: mean of the last step's known rewards.
    """

    folder: Path
    model: Path
    num_steps: int
    num_rollouts: int
    num_tokens: int
    num_absent: int
    num_zero_signal: int
    too_long: dict[str, int]
    elapsed_s: float
    reward: float | None


def train_curriculum(
    model: str | Path,
    tasks: Sequence[Task],
    settings: GRPOSettings,
    out: Path,
    *,
    verifier: Verifier | None = None,
    progress: ReportProgress | None = None,
    reselect: Reselect | None = None,
) -> TrainingResult:
    """Practise ``tasks`` by GRPO; the same call continues what was interrupted.

    On a CPU, a run that was killed and continued ends with the same weights, bit for bit, as one
    that was not. The first Ctrl-C ends the run after the step under way, saves, and raises
    ``KeyboardInterrupt``; a second one does so at once, and loses what came after the last
    checkpoint. Started by ``accelerate launch`` or ``torchrun``, every process holds the model and
    has its share of each update's completions.

    Args:
        model: a bundled name, a folder, or a hub id.
        tasks: with answers or tests; those for evaluation only are refused.
        settings: what is learned, and how.
        out: the run's folder; made if missing.
        verifier: ``None``: one with default settings.
        progress: told after each step (in the first process).
        reselect: chooses tasks anew every ``settings.reselect_every`` steps; ``None``: those that
            were given and lie within ``settings.band``.

    Raises:
        TaskError: no tasks that can be practised here.
        ModelError: a model that can't be loaded, has no end token or no room for prompts, or whose
            predictions change with padding.
        FingerprintMismatchError: ``out`` holds a run of another model, other tasks or settings.
        SettingsError: settings that don't fit the number of processes.
        MissingDependencyError: TRL (extra ``curriculum``) or vLLM is not installed.
    """
    if not tasks:
        raise TaskError("expected tasks to practise, found none")
    withheld = [task.id for task in tasks if task.meta.get("evaluation_only")]
    if withheld:
        raise TaskError(
            f"{len(withheld)} tasks are for evaluation only ({withheld[0]!r:.80}, …): their "
            "authors ask not to train on them; leave them out"
        )
    if reselect is not None and settings.reselect_every is None:
        raise SettingsError("reselect is given, but settings.reselect_every says never")
    keep_freed_memory()
    with contextlib.ExitStack() as stack:
        if verifier is None:
            verifier = stack.enter_context(Verifier())
        verifier.require(tasks)
        stack.enter_context(_random_state_kept())
        stack.enter_context(_quiet())
        lm = load_language_model(
            ModelSettings(name=str(model), dtype=settings.dtype, device=_device(settings))
        )
        _require_learnable(lm)
        session = _Session(lm, tasks, settings, Path(out), verifier, progress, reselect)
        return session.finish()


class _Session:
    """One call: from where the folder's last checkpoint is, to the run's end."""

    def __init__(
        self,
        lm: LanguageModel,
        tasks: Sequence[Task],
        settings: GRPOSettings,
        out: Path,
        verifier: Verifier,
        progress: ReportProgress | None,
        reselect: Reselect | None,
    ) -> None:
        self.lm, self.settings, self.out, self.verifier = lm, settings, out, verifier
        self.progress, self.reselect = progress, reselect
        self.leads = int(os.environ.get("RANK", "0")) == 0
        self.prompts: Prompts = fitting_prompts(
            lm.model,
            lm.tokenizer,
            tasks,
            settings,
            max_completion_tokens=settings.max_completion_tokens,
        )
        self.num_steps = settings.num_steps or steps_of_epochs(
            len(self.prompts.tasks), settings.epochs, settings.prompts_per_step
        )
        self.key = stable_hash(
            {
                "settings": settings.model_dump(mode="json", exclude=EXTENSIBLE),
                "model": lm.fingerprint,
                "tasks": [to_json(task) for task in tasks],
                "reselect": reselect is not None,
            }
        )
        self.first_step, self.state = _saved_state(out, self.key)

    def finish(self) -> TrainingResult:
        if self.leads:
            self.out.mkdir(parents=True, exist_ok=True)
            remove_orphans(self.out)
            cut_history(self.out, self.first_step)
            with atomic_write(self.out / SETTINGS, "w") as stream:
                stream.write(to_toml(self.settings) + "\n")
        policy = self.lm.model
        if self.settings.method == "lora":
            policy = with_adapter(policy, self.settings)
        weights = TrainableWeights(policy)
        if self.first_step >= self.num_steps:
            load_checkpoint(self.out / CHECKPOINTS, weights, [], key=self.key)
            return self._written(policy)
        trainer = self._train(policy, weights)
        try:
            return self._written(policy)
        finally:
            # Others wait until the files are there.
            trainer.accelerator.wait_for_everyone()
            if trainer.accelerator.num_processes > 1:
                trainer.accelerator.end_training()

    def _train(self, policy: Any, weights: TrainableWeights) -> CurriculumTrainer:
        settings = self.settings
        curriculum = PractisedTasks(
            self.prompts, policy, self.lm.tokenizer, settings, self.out, self.state.since
        )
        arguments = grpo_arguments(
            settings,
            folder=str(self.out),
            num_steps=self.num_steps - self.first_step,
            num_processes=int(os.environ.get("WORLD_SIZE", "1")),
            device=self.lm.model.device.type,
            num_parameters=sum(parameter.numel() for parameter in policy.parameters()),
        )
        trainer = CurriculumTrainer(
            model=policy,
            tokenizer=self.lm.tokenizer,
            arguments=arguments,
            settings=settings,
            practice=curriculum.practice,
            verifier=self.verifier,
            first_step=self.first_step,
        )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise SettingsError(
                "each process holds the whole model here: FSDP and DeepSpeed are not supported; "
                "launch without them, with method 'lora' for a model too large to learn whole"
            )
        stop = StopRequest()
        keeper = StepKeeper(
            trainer,
            curriculum,
            weights,
            self.state,
            key=self.key,
            num_steps=self.num_steps,
            progress=self.progress,
            reselect=self.reselect,
            stop=stop,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(keeper)
        with stop.listening():
            trainer.train()
        if keeper.saved_step < self.num_steps:
            raise KeyboardInterrupt
        return trainer

    def _written(self, policy: Any) -> TrainingResult:
        state = self.state
        result = TrainingResult(
            folder=self.out,
            model=self.out / MODEL,
            num_steps=max(self.first_step, self.num_steps),
            num_rollouts=state.num_rollouts,
            num_tokens=state.num_tokens,
            num_absent=state.num_absent,
            num_zero_signal=state.num_zero_signal,
            too_long=self.prompts.too_long,
            elapsed_s=state.elapsed_s,
            reward=state.reward,
        )
        if self.leads:
            write_model(policy, self.lm.tokenizer, self.settings, self.out)
            values = {k: v for k, v in asdict(result).items() if k not in ("folder", "model")}
            write_json(self.out / RESULT, values | {"model": self.lm.name, "key": self.key})
        return result


def _saved_state(out: Path, key: str) -> tuple[int, RunState]:
    """Where the newest checkpoint stands, from JSON alone: weights are loaded once, later."""
    folder = out / CHECKPOINTS
    found = (
        sorted(p for p in folder.iterdir() if FOLDER.fullmatch(p.name)) if folder.is_dir() else []
    )
    if not found:
        return 0, RunState()
    saved: dict[str, Any] = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
    if saved["key"] != key:
        raise FingerprintMismatchError(
            f"{out} holds a run of another model, other tasks or other settings than those given; "
            f"use those (see {SETTINGS} there), or another output folder"
        )
    return int(saved["step"]), RunState(**saved["run"])


def _require_learnable(lm: LanguageModel) -> None:
    if importlib.util.find_spec("trl") is None:
        raise MissingDependencyError(
            "training needs TRL, which is not installed; install ttt-adapt[curriculum]"
        )
    if lm.tokenizer.eos_token_id is None:
        raise ModelError(
            f"{lm.name}: expected a tokenizer with an end token, which completions end with, found "
            "none; set tokenizer.eos_token and save the tokenizer again"
        )
    check_padding_invariance(lm.model, lm.tokenizer)


def _device(settings: GRPOSettings) -> str:
    device = resolve_device(settings.device)
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """TRL seeds every global generator; the caller's are put back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No remarks of libraries beside our lines: absent rewards, which TRL prints whole, are counted
    in the history; levels are put back."""
    loggers = [logging.getLogger(name) for name in ("trl", "transformers", "accelerate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # TRL asks by the old names.
            warnings.filterwarnings("ignore", "`.*gradient_checkpointing", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
