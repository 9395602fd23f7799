"""The model that practises in the demonstration: it can do what every family asks, and usually
does something else.

It is trained on answers of which most are another family's: those of the one family that this one
is habitually mistaken for. So the right answer has a probability that is small and not zero, and
practising with a verifier can raise it. Nothing new is learned then; something known is elicited.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pydantic import Field

from ttt_adapt.curriculum.demonstration.characters import (
    character_model,
    character_tokenizer,
    save_character_model,
)
from ttt_adapt.curriculum.demonstration.families import FAMILIES, LENGTH, string_task
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.settings import Settings
from ttt_adapt.storage import stable_hash, write_json

CARD = "pretraining.json"
CODE_VERSION = "habits-1"
"""Changes whenever the same settings would give another model."""
MISTAKEN_FOR = 5
"""Places between a family and the one it is mistaken for, in the order of :data:`FAMILIES`."""


class HabitSettings(Settings):
    """How the demonstration's model is made. Owner: ``ttt_adapt.curriculum.demonstration``."""

    num_steps: Annotated[int, Field(ge=1)] = 400
    batch_size: Annotated[int, Field(ge=1)] = 128
    learning_rate: Annotated[float, Field(gt=0.0)] = 6e-3
    wrong_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.75
    """Answers that are another family's."""
    seed: Annotated[int, Field(ge=0)] = 0


def pretrain(
    folder: Path,
    settings: HabitSettings | None = None,
    *,
    without: Sequence[Task] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Train the model and write it to ``folder``, or leave what is there if it is the same.

    Args:
        folder: holds model, tokenizer and a card with the loss curve in the end.
        without: tasks whose strings are never shown under their family.
        progress: gets steps done and their total.

    Returns:
        the folder.
    """

    settings = settings or HabitSettings()
    held_out = {task.id for task in without}
    key = stable_hash(
        {"settings": settings.model_dump(), "without": sorted(held_out), "code": CODE_VERSION}
    )
    if _key_of(folder) == key:
        return folder
    started = time.monotonic()
    model, tokenizer = character_model(settings.seed), character_tokenizer()
    optimizers = _optimizers(model, settings.learning_rate)
    generator = Random(f"habits/{settings.seed}")
    losses = []
    model.train()
    for step in range(settings.num_steps):
        prompts, answers = zip(
            *(
                _example(generator, settings.wrong_share, held_out)
                for _ in range(settings.batch_size)
            ),
            strict=True,
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _rate_share(step, settings.num_steps)
        loss = _loss(model, tokenizer, prompts, answers)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(round(float(loss.detach()), 4))
        if progress is not None:
            progress(step + 1, settings.num_steps)
    save_character_model(model.eval(), folder)
    card = {
        "key": key,
        "settings": settings.model_dump(),
        "num_weights": sum(parameter.numel() for parameter in model.parameters()),
        "losses": losses[:: max(1, settings.num_steps // 40)],
        "elapsed_s": round(time.monotonic() - started, 1),
    }
    write_json(folder / CARD, card)  # last: without it the folder is not finished
    return folder


def habit(family: str) -> str:
    """The family that this one is mistaken for."""
    names = list(FAMILIES)
    return names[(names.index(family) + MISTAKEN_FOR) % len(names)]


def _key_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / CARD).read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _example(generator: Random, wrong_share: float, held_out: set[str]) -> tuple[str, str]:
    """A prompt, and an answer that is wrong as often as asked for."""
    while True:
        family = generator.choice(list(FAMILIES))
        digits = "".join(generator.choice("0123456789") for _ in range(LENGTH))
        if f"{family}/{digits}" not in held_out:
            break
    done = habit(family) if generator.random() < wrong_share else family
    return string_task(family, digits).prompt, FAMILIES[done](digits)


def _optimizers(model: Any, learning_rate: float) -> list[Any]:
    """Muon for matrices between hidden states, AdamW for the rest: Muon needs a third of the steps
    that AdamW alone does."""
    import torch

    is_hidden = {
        name: parameter.ndim == 2 and "embed" not in name
        for name, parameter in model.named_parameters()
    }
    hidden = [parameter for name, parameter in model.named_parameters() if is_hidden[name]]
    rest = [parameter for name, parameter in model.named_parameters() if not is_hidden[name]]
    options: dict[str, Any] = {"lr": learning_rate, "weight_decay": 0.0}
    return [
        torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(rest, **options),
    ]


def _rate_share(step: int, num_steps: int) -> float:
    """A short rise, a constant stretch, a linear fall over the second half."""
    return min(1.0, (step + 1) / 20, max(0.02, 2.0 * (num_steps - step) / num_steps))


def _loss(model: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]) -> Any:
    """Mean loss in nats of the answers' tokens; every prompt has as many as another."""
    import torch

    texts = [
        tokenizer.bos_token + prompt + answer + tokenizer.eos_token
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    tokens_BT = torch.tensor(tokenizer(texts)["input_ids"])
    num_prompt = len(prompts[0]) + 1
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, num_prompt - 1 : -1].float()
    return torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), tokens_BT[:, num_prompt:].flatten()
    )
