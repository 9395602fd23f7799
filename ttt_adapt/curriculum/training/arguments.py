"""Arguments of TRL's trainer, as this project's settings say and as a CPU can bear."""

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.errors import MissingDependencyError, SettingsError
from ttt_adapt.runtime import uses_bfloat16

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

CHECKPOINTED_PARAMETERS = 300_000_000
"""From so many on, activations are computed twice instead of kept."""


def grpo_arguments(
    settings: GRPOSettings,
    *,
    folder: str,
    num_steps: int,
    num_processes: int,
    device: str,
    num_parameters: int,
) -> "GRPOConfig":
    """TRL's arguments for ``num_steps`` steps.

    TRL's own defaults fail on a CPU or surprise there: bfloat16 is on (an error without
    ``use_cpu``, silently imprecise with it), gradient checkpointing is on for the smallest model,
    and memory is pinned for a GPU that is not there.

    Raises:
        SettingsError: an update's completions can't be shared equally among the processes.
        MissingDependencyError: generation by vLLM, which is not installed.
    """
    from trl.trainer.grpo_config import GRPOConfig

    per_update = (
        settings.prompts_per_update or settings.prompts_per_step
    ) * settings.num_generations
    if per_update % num_processes:
        raise SettingsError(
            f"{num_processes} processes must share the {per_update} completions of an update "
            "equally; change num_generations, prompts_per_update or the number of processes"
        )
    per_process = per_update // num_processes
    micro = min(settings.micro_batch_size or per_process, per_process)
    if per_process % micro:
        raise SettingsError(
            f"micro_batch_size ({micro}) must divide the {per_process} completions that each of "
            f"{num_processes} processes has in an update"
        )
    accumulation = per_process // micro
    updates = settings.updates_per_step // settings.num_iterations
    on_cpu = device == "cpu"
    checkpointing = settings.gradient_checkpointing == "on" or (
        settings.gradient_checkpointing == "auto" and num_parameters >= CHECKPOINTED_PARAMETERS
    )
    # Renamed within transformers 5; the old name warns where the new one is known.
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    new, old = "activation_checkpointing", "gradient_checkpointing"
    options: dict[str, Any] = {new if new in names else old: checkpointing}
    if settings.generation == "vllm":
        options |= vllm_arguments(settings)
    return GRPOConfig(
        output_dir=folder,
        # One process, one device: several visible GPUs would make the trainer copy the model.
        use_cpu=on_cpu,
        bf16=_autocasts(settings, device),
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=settings.updates_per_step,
        max_steps=num_steps * settings.updates_per_step,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * updates,
        num_generations=settings.num_generations,
        num_iterations=settings.num_iterations,
        max_completion_length=settings.max_completion_tokens,
        temperature=settings.temperature,
        mask_truncated_completions=not settings.learn_from_truncated,
        learning_rate=settings.learning_rate,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        beta=settings.kl_weight,
        loss_type=settings.loss,
        scale_rewards=settings.scale_rewards,
        # What is learned from is what was drawn: by the model without dropout.
        disable_dropout=True,
        shuffle_dataset=False,
        seed=settings.seed % 2**32,
        **options,
    )


def _autocasts(settings: GRPOSettings, device: str) -> bool:
    """Whether passes autocast to bfloat16: of itself only off the CPU."""
    if settings.precision == "auto" and device == "cpu":
        return False
    return uses_bfloat16(settings.precision, device)


def vllm_arguments(settings: GRPOSettings) -> dict[str, Any]:
    """Arguments for generation by vLLM.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "generation = 'vllm' needs the package vllm, which is not installed; install it on a "
            "machine with a GPU, or set generation to 'batched'"
        )
    options: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": settings.vllm_mode,
        "vllm_gpu_memory_utilization": settings.vllm_memory_share,
        "vllm_max_model_length": settings.max_prompt_tokens + settings.max_completion_tokens,
    }
    if settings.vllm_server_url:
        options["vllm_server_base_url"] = settings.vllm_server_url
    return options
