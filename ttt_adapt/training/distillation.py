"""Recovery of a converted model, in two stages (Zhang et al. 2024, LoLCATs, arXiv 2410.10254).

1. Attention transfer: each new layer learns to give the output of the attention it replaces, on the
   hidden states of the original model; everything else is frozen.
2. LoRA on the converted model, its new parameters learning too, with cross-entropy and the
   divergence from the original's predictions. The low-rank matrices are merged afterwards.

Both are deterministic given the settings' seed, and go on from a checkpoint to the same result. The
original needs no memory of its own: it is the converted model with its layers in another role.

Shape legend: B sequences of a step, T tokens, C width, V vocabulary.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from ttt_adapt.conversion_settings import DistillationSettings
from ttt_adapt.errors import AdaptationError, CorpusError, ModelError
from ttt_adapt.models.conversion import (
    ConvertedForCausalLM,
    layers_in_role,
    trained_parameters,
)
from ttt_adapt.models.conversion.families import family_of
from ttt_adapt.storage import sha256_bytes, stable_hash
from ttt_adapt.training.checkpoint import load_checkpoint, save_checkpoint
from ttt_adapt.training.mixture import packed_blocks
from ttt_adapt.training.schedule import learning_rate_factor

__all__ = [
    "StageResult",
    "attention_projections",
    "pack_tokens",
    "recover_with_lora",
    "transfer_attention",
    "transfer_errors",
]

Tokens = NDArray[Any]
"""Token ids ``[num_tokens]``, each document preceded by the beginning token."""


@dataclass(frozen=True)
class StageResult:
    """What a stage of distillation reports.

    Attributes:
        losses: of each step, in nats (LoRA) or as relative squared errors (attention transfer).
        num_tokens: tokens learned from.
    """

    losses: tuple[float, ...]
    num_tokens: int


def transfer_attention(
    model: ConvertedForCausalLM,
    tokens: Tokens,
    settings: DistillationSettings,
    *,
    seed: int = 0,
    folder: Path | None = None,
    report: Callable[[str], None] = print,
) -> StageResult:
    """Stage one: new layers learn the output of the attention they replace.

    A layer's loss is ``‖learned − attention‖² / ‖attention‖²`` over a batch, so that layers weigh
    alike whatever their scale; the loss of a step is their mean.

    Args:
        model: with parameters of its own in its converted layers; changed in place.
        tokens: to learn from.
        folder: for checkpoints; continued if it holds any.
        report: receives a line of progress at a time.

    Raises:
        ModelError: nothing to train, or weights that are not float32.
        CorpusError: too few tokens.
        AdaptationError: the loss became NaN or infinite.
        FingerprintMismatchError: ``folder`` holds a run with other settings.
    """
    parameters = trained_parameters(model)
    if not parameters:
        raise ModelError(
            "expected converted layers with parameters of their own, found none; convert with "
            "mode='distilled', or leave attention transfer out"
        )
    _require_float32(model)
    batch = _batches(tokens, settings, seed)

    def loss(step: int) -> torch.Tensor:
        errors = transfer_errors(model, batch(step).to(model.device))
        return torch.stack(list(errors.values())).mean()

    with _learning(model, parameters):
        losses = _run_stage(
            loss,
            parameters,
            settings,
            num_steps=settings.transfer_steps,
            learning_rate=settings.transfer_learning_rate,
            key=stable_hash({"stage": "transfer", **_identity(model, tokens, settings, seed)}),
            folder=None if folder is None else folder / "transfer",
            report=lambda line: report(f"attention transfer: {line}"),
        )
    return StageResult(losses, len(losses) * settings.batch_size * settings.max_length)


def transfer_errors(
    model: ConvertedForCausalLM, tokens_BT: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Relative squared error of each converted layer's output, by layer, on the original's inputs."""
    errors: dict[int, torch.Tensor] = {}

    def compare(layer: int, learned: torch.Tensor, wanted: torch.Tensor) -> None:
        scale = wanted.float().square().mean()
        errors[layer] = functional.mse_loss(learned.float(), wanted.float()) / scale

    with layers_in_role(model, "transfer") as layers:
        for layer in layers:
            layer.on_transfer = compare
        try:
            # The head is not needed.
            model.base.base_model(input_ids=tokens_BT, use_cache=False)
        finally:
            for layer in layers:
                layer.on_transfer = None
    return errors


def recover_with_lora(
    model: ConvertedForCausalLM,
    tokens: Tokens,
    settings: DistillationSettings,
    *,
    seed: int = 0,
    folder: Path | None = None,
    report: Callable[[str], None] = print,
) -> StageResult:
    """Stage two: LoRA and the new layers' parameters learn to predict text; then LoRA is merged.

    The loss is ``(1 − w) · cross-entropy + w · KL(original ‖ converted)``, w: ``kl_weight``. A model
    without converted layers learns too: the control that shows what LoRA alone does.

    Args, raises: as :func:`transfer_attention`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _require_float32(model)
    batch, weight = _batches(tokens, settings, seed), settings.kl_weight
    targets = settings.lora_targets or attention_projections(model)
    options: dict[str, Any] = {
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "target_modules": list(targets),
    }
    identity = _identity(model, tokens, settings, seed)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # GPT-2's projections keep their weights transposed; peft sees it, and says so.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        try:
            inject_adapter_in_model(LoraConfig(**options), model)
        except ValueError as error:
            raise ModelError(f"LoRA: {' '.join(str(error).split())[:200]}") from error
    parameters = dict(trained_parameters(model))
    parameters |= {name: p for name, p in model.named_parameters() if "lora_" in name}

    def loss(step: int) -> torch.Tensor:
        tokens_BT = batch(step).to(model.device)
        inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:].flatten()
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
        found = functional.cross_entropy(logits, targets)
        if weight:
            wanted = _original_logits(model, inputs).flatten(0, 1).float().log_softmax(-1)
            divergence = functional.kl_div(
                logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True
            )
            found = (1.0 - weight) * found + weight * divergence
        return found

    try:
        with _learning(model, parameters):
            losses = _run_stage(
                loss,
                parameters,
                settings,
                num_steps=settings.lora_steps,
                learning_rate=settings.lora_learning_rate,
                key=stable_hash({"stage": "lora", "targets": sorted(targets), **identity}),
                folder=None if folder is None else folder / "lora",
                report=lambda line: report(f"LoRA: {line}"),
            )
    finally:
        _merge_lora(model)
    return StageResult(losses, len(losses) * settings.batch_size * settings.max_length)


def attention_projections(model: ConvertedForCausalLM) -> tuple[str, ...]:
    """Full names of the projections of every layer's attention, converted or not."""
    family = family_of(model.base.config)
    return tuple(
        name
        for name, _ in model.named_modules()
        if name.rsplit(".", 1)[-1] in family.projections and f".{family.attention}." in name
    )


def pack_tokens(tokenizer: Any, texts: Iterator[str], beginning: int, max_tokens: int) -> Tokens:
    """Texts one after the other, each preceded by ``beginning``, ``max_tokens`` at most.

    Raises:
        CorpusError: there is no text.
    """
    found: list[int] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        found += [beginning, *ids]
        if len(found) >= max_tokens:
            break
    if not found:
        raise CorpusError("the text to learn from is empty; name another")
    return np.array(found[:max_tokens], dtype=np.int64)


@torch.no_grad()
def _original_logits(model: ConvertedForCausalLM, inputs_BT: torch.Tensor) -> torch.Tensor:
    """Those of the model before conversion: its attention back in place, LoRA off."""
    with layers_in_role(model, "original"), _lora_off(model):
        logits: torch.Tensor = model(input_ids=inputs_BT, use_cache=False).logits
    return logits


def _run_stage(
    loss: Callable[[int], torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    settings: DistillationSettings,
    *,
    num_steps: int,
    learning_rate: float,
    key: str,
    folder: Path | None,
    report: Callable[[str], None],
) -> tuple[float, ...]:
    """AdamW on ``parameters`` with warm-up and decay; losses of all steps."""
    # A module, for that is what checkpoints hold; names of parameters may hold no dots.
    trained = nn.ParameterDict({name.replace(".", "/"): p for name, p in parameters.items()})
    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    first, losses = 0, []
    if folder is not None:
        state = load_checkpoint(folder, trained, [optimizer], key=key)
        if state:
            first, losses = state["step"], state["losses"]
            report(f"continuing after step {first} of {num_steps}")
    for step in range(first, num_steps):
        factor = learning_rate_factor(
            step,
            num_steps,
            warmup_fraction=settings.warmup_fraction,
            decay_fraction=settings.decay_fraction,
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor
        value = loss(step)
        if not math.isfinite(float(value.detach())):
            raise AdaptationError(
                f"the loss became {float(value.detach())} at step {step}; lower the stage's "
                "learning rate, or the layers' own (conversion.learning_rate)"
            )
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(value.detach()))
        done = step + 1
        if folder is not None and (done % settings.checkpoint_every == 0 or done == num_steps):
            save_checkpoint(folder, done, trained, [optimizer], {"key": key, "losses": losses})
        if done % 20 == 0 or done == num_steps:
            recent = losses[-20:]
            report(f"step {done}/{num_steps}  loss {sum(recent) / len(recent):.4f}")
    return tuple(losses)


def _batches(
    tokens: Tokens, settings: DistillationSettings, seed: int
) -> Callable[[int], torch.Tensor]:
    """int64 ``[B, T + 1]`` of each step, in a seeded order that differs by epoch."""
    _, block = packed_blocks(tokens, settings.max_length, seed)
    size = settings.batch_size

    def batch(step: int) -> torch.Tensor:
        blocks = [block(position) for position in range(step * size, (step + 1) * size)]
        return torch.from_numpy(np.stack(blocks))

    return batch


def _identity(
    model: ConvertedForCausalLM, tokens: Tokens, settings: DistillationSettings, seed: int
) -> dict[str, Any]:
    """What a stage's result depends on."""
    frozen = sum(float(p.detach().double().sum()) for p in model.parameters())
    return {
        "conversion": model.config.conversion,
        "settings": settings.model_dump(exclude={"checkpoint_every"}),
        "seed": seed,
        "tokens": sha256_bytes(tokens.tobytes()),
        "weights": repr(frozen),
    }


@contextlib.contextmanager
def _learning(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Only these parameters get gradients; eval mode, so that no dropout makes runs differ."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    training = model.training
    model.eval().requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)
            parameter.grad = None
        model.train(training)


def _lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [
        (name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)
    ]


@contextlib.contextmanager
def _lora_off(model: nn.Module) -> Iterator[None]:
    layers = _lora_layers(model)
    for _, layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in layers:
            layer.enable_adapters(True)


def _merge_lora(model: nn.Module) -> None:
    """Add the low-rank matrices to the weights they stand beside, and put those back."""
    for name, layer in _lora_layers(model):
        layer.merge()
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def _require_float32(model: Any) -> None:
    if model.dtype != torch.float32:
        raise ModelError(
            f"expected a model in float32 to learn with, found {model.dtype}; load it with "
            "model.dtype = 'float32'"
        )
