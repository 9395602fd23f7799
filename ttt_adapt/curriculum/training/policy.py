"""The model that learns: with an adapter or whole, and as it is written in the end."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.errors import SettingsError
from ttt_adapt.runtime import derived_seed, quiet_transformers
from ttt_adapt.storage import sync_file, sync_folder, temporary_sibling

ADAPTER = "adapter"
MODEL = "model"


def with_adapter(model: Any, settings: GRPOSettings) -> Any:
    """The model with LoRA layers, drawn by the settings' seed; only these learn.

    Raises:
        SettingsError: ``lora_targets`` names no linear layer of it, or its output head.
    """
    from peft import LoraConfig, get_peft_model

    if "lm_head" in settings.lora_targets:
        raise SettingsError(
            "lora_targets: lm_head can't have an adapter, as TRL computes log-probabilities from "
            "its weights; name other layers"
        )
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=0.0,
        target_modules=list(settings.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(derived_seed(settings.seed, "lora"))
    try:
        with warnings.catch_warnings():
            # GPT-2's transposed layers are recognised, with a warning that says so.
            warnings.simplefilter("ignore", UserWarning)
            return get_peft_model(model, config)
    except ValueError as error:
        raise SettingsError(f"lora_targets: {' '.join(str(error).split())[:300]}") from None


def write_model(policy: Any, tokenizer: Any, settings: GRPOSettings, out: Path) -> None:
    """Write ``model/`` (adapters merged), and ``adapter/`` with LoRA: whole, or not at all.

    The policy is not to be used for learning after this.
    """
    if settings.method == "lora":
        _write(policy, None, out / ADAPTER)
        policy = policy.merge_and_unload()
    if settings.save_dtype is not None:
        policy = policy.to(getattr(torch, settings.save_dtype))
    _write(policy, tokenizer, out / MODEL)


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    temporary = temporary_sibling(target)
    temporary.mkdir(parents=True)
    with quiet_transformers():
        model.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    for path in temporary.iterdir():
        if path.is_file():
            sync_file(path)
    sync_folder(temporary)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    sync_folder(target.parent)
