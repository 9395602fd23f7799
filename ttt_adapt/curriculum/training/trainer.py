"""TRL's GRPOTrainer, told which tasks a step practises and what must not be learned from.

What is different from TRL's own:

- A step's tasks come from the schedule, not from a data loader that reads ahead, so that tasks can
  be chosen anew between steps; every random number comes from the seed and the step alone, so that
  a run that was stopped between steps goes on as if it had not been.
- Position ids are given to the model with padded rows (see ``ttt_adapt.curriculum.padding``).
- Completions without a reward, and groups without a difference in rewards, leave the batch: they
  cost no pass and don't count in averages. An update without any signal doesn't happen.
- On a CPU with a small vocabulary, log-probabilities come from plain logits: TRL's kernel sets
  aside a tile 32,768 columns wide.

Shape legend: B completions of this process, P prompt tokens, C completion tokens, G groups of a
step, N completions of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from ttt_adapt.curriculum.decoding import (
    end_token_ids,
    forward_parameters,
    padding_token_id,
    position_ids,
    sample_token_ids,
    takes_position_ids,
    uniform_numbers,
)
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.curriculum.verifying import Verifier
from ttt_adapt.runtime import derived_seed

DENSE_LOGITS = 2**24
"""Logits of a pass up to which a CPU keeps them all."""


@dataclass(frozen=True, slots=True)
class Practice:
    """What one step practises: each task with its prompt's token ids."""

    tasks: Sequence[Task]
    token_ids: Sequence[Sequence[int]]


@dataclass
class Outcome:
    """What came of a step's completions, over all processes."""

    task_ids: list[str]
    rewards_GN: torch.Tensor
    """float32, NaN where absent."""
    signal_G: torch.Tensor
    """bool: whether a group's known rewards differ."""
    num_tokens: int
    skipped_updates: int = 0


# TRL's methods have no types.
_Trainer: Any = GRPOTrainer


class CurriculumTrainer(_Trainer):  # type: ignore[misc]
    """See the module's docstring.

    Args:
        practice: what a step (from 0) practises.
        first_step: where this session begins.
    """

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        arguments: GRPOConfig,
        settings: GRPOSettings,
        practice: Callable[[int], Practice],
        verifier: Verifier,
        first_step: int,
    ) -> None:
        self.settings, self.practice, self.verifier = settings, practice, verifier
        self.first_step = first_step
        self.outcome: Outcome | None = None
        self._rows: list[tuple[int, int]] = []
        self._practice = Practice((), ())
        self._rewards = torch.empty(0)
        self._num_learned = 0
        rows = settings.prompts_per_step
        super().__init__(
            model=model,
            reward_funcs=self.verified,
            args=arguments,
            # Says how many rows a step has; the rows themselves come from the schedule.
            train_dataset=Dataset.from_dict({"prompt": [""] * rows * 64}),
            processing_class=tokenizer,
        )
        self._end_ids = end_token_ids(model, tokenizer)
        self._takes_positions = takes_position_ids(model)
        self._limits_logits = "logits_to_keep" in forward_parameters(model)

    @property
    def steps_done(self) -> int:
        """Over all sessions."""
        done: int = self.state.global_step
        return self.first_step + done // self.settings.updates_per_step

    def _send_telemetry(self) -> None:
        """None: TRL would report each trainer to its makers."""

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The learning rate rises over the warm-up's updates, wherever this session began."""
        per_step = self.settings.updates_per_step
        before, rising = self.first_step * per_step, self.settings.warmup_steps * per_step

        def factor(update: int) -> float:
            return min(1.0, (before + update + 1) / (rising + 1))

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        step, num = self.steps_done, self.settings.num_generations
        self._practice = self.practice(step)
        first = self.accelerator.process_index * len(inputs)
        self._rows = [divmod(row, num) for row in range(first, first + len(inputs))]
        seed = derived_seed(self.settings.seed, "updates", step, self.accelerator.process_index)
        torch.manual_seed(seed)
        tokens_before = self.state.num_input_tokens_seen
        rows = [{"prompt": self._practice.tasks[group].prompt} for group, _ in self._rows]
        output: dict[str, Any] = super()._generate_and_score_completions(rows)
        rewards_GN = self._rewards.view(-1, num)
        known_GN = ~torch.isnan(rewards_GN)
        low_G = rewards_GN.nan_to_num(nan=torch.inf).amin(dim=1)
        high_G = rewards_GN.nan_to_num(nan=-torch.inf).amax(dim=1)
        signal_G = high_G > low_G
        learned_GN = known_GN & signal_G[:, None] if self._skips else known_GN
        learned_B = learned_GN.flatten()[first : first + len(inputs)]
        output["learned"] = learned_B & output["completion_mask"].any(dim=1)
        mask_BC = output["completion_mask"] * learned_B[:, None]
        output["num_items_in_batch"] = self.accelerator.gather(mask_BC.sum()).sum()
        self.outcome = Outcome(
            [task.id for task in self._practice.tasks],
            rewards_GN.cpu(),
            signal_G.cpu(),
            int(self.state.num_input_tokens_seen - tokens_before),
        )
        return output

    @property
    def _skips(self) -> bool:
        return self.settings.zero_signal == "skip"

    def verified(self, prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        """TRL's reward function: the verifier's rewards, ``None`` where there is none."""
        tasks = [self._practice.tasks[group] for group, _ in self._rows]
        verdicts = self.verifier.verify_all(
            tasks, completions, num_workers=self.settings.num_verifiers
        )
        return [verdict.reward for verdict in verdicts]

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*arguments, **options)
        self._rewards = rewards[:, 0].float()
        return rewards

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [list(self._practice.token_ids[group]) for group, _ in self._rows], None, {}

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        **options: Any,
    ) -> tuple[list[list[int]], Any]:
        if self.settings.generation != "batched":
            found: tuple[list[list[int]], Any] = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, **options
            )
            return found
        num = self.settings.num_generations
        # A process has whole groups, or each row by itself.
        together = num if len(prompt_ids) % num == 0 else 1
        length = self.settings.max_completion_tokens
        numbers: dict[int, torch.Tensor] = {}
        for group, _ in self._rows:
            if group not in numbers:
                key = f"step {self.steps_done} {group} {self._practice.tasks[group].id}"
                numbers[group] = uniform_numbers(self.settings.seed, key, num, length)
        uniforms = torch.stack([numbers[group][sample] for group, sample in self._rows])
        completions = sample_token_ids(
            self.accelerator.unwrap_model(self.model_wrapped),
            prompt_ids[::together],
            uniforms.view(-1, together, length),
            temperature=self.settings.temperature,
            end_ids=self._end_ids,
            pad_id=padding_token_id(self.processing_class),
        )
        return [ids for group in completions for ids in group], None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        def with_positions(**inputs: Any) -> Any:
            if self._takes_positions:
                inputs["position_ids"] = position_ids(inputs["attention_mask"])
            return model(**inputs)

        rows = min(batch_size or len(input_ids), len(input_ids))
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        is_small = rows * (logits_to_keep + 1) * vocabulary <= DENSE_LOGITS
        if input_ids.device.type == "cpu" and is_small and not compute_aux_loss:
            found = [
                self._dense(with_positions, tokens, mask, logits_to_keep)
                for tokens, mask in zip(
                    torch.split(input_ids, rows), torch.split(attention_mask, rows), strict=True
                )
            ]
            entropies = torch.cat([entropy for _, entropy in found]) if compute_entropy else None
            return torch.cat([log_probs for log_probs, _ in found]), entropies, None
        result: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = (
            super()._get_per_token_logps_and_entropies(
                with_positions,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **options,
            )
        )
        return result

    def _dense(
        self, model: Any, tokens: torch.Tensor, mask: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the last ``keep`` tokens, zero where masked."""
        with self.accelerator.autocast():
            options = {"logits_to_keep": keep + 1} if self._limits_logits else {}
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, **options).logits
        logits = logits[:, -keep - 1 : -1].float() / self.temperature
        log_probs = torch.log_softmax(logits, dim=-1)
        hidden = mask[:, -keep:] == 0
        chosen = log_probs.gather(-1, tokens[:, -keep:, None])[..., 0]
        # Only reported: nothing here has an entropy bonus.
        with torch.no_grad():
            entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
        return chosen.masked_fill(hidden, 0.0), entropies.masked_fill(hidden, 0.0)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, self._learnable(inputs))
        return loss

    def _learnable(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The rows to learn from, without columns that hold only padding.

        Every process goes through the model with as many rows as the others, as TRL gathers their
        metrics: at least one, and masked ones where a process has fewer to learn from.
        """
        inputs = dict(inputs)
        learned_B = inputs.pop("learned")
        count = learned_B.sum()
        self._num_learned += int(count)
        num_rows = max(1, int(self.accelerator.gather(count).max()))
        rows = torch.argsort(~learned_B, stable=True)[:num_rows]
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(learned_B):
                inputs[name] = value[rows]
        inputs["advantages"] = inputs["advantages"] * learned_B[rows]
        inputs["completion_mask"] = inputs["completion_mask"] * learned_B[rows, None]
        num_prompt = int(inputs["prompt_mask"].sum(dim=1).max())
        num_completion = max(1, int(inputs["completion_mask"].sum(dim=1).max()))
        for name, value in inputs.items():
            if name in ("prompt_ids", "prompt_mask"):
                inputs[name] = value[:, -num_prompt:]
            elif isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] > 1:
                inputs[name] = value[:, :num_completion]
        return inputs

    def drop_empty_update(self) -> None:
        """Called before an update: without anything learned, gradients vanish, and Adam with them."""
        counts = torch.tensor([self._num_learned], device=self.accelerator.device)
        self._num_learned = 0
        if int(self.accelerator.gather(counts).sum()) == 0:
            assert self.outcome is not None
            self.outcome.skipped_updates += 1
            self.model.zero_grad(set_to_none=True)
