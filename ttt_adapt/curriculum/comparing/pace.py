"""How fast a model draws and learns here, from a few tokens: what estimates are made of."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum.sampling_settings import PromptSettings
from ttt_adapt.curriculum.tasks import Task

NUM_TASKS, NUM_SAMPLES, NUM_TOKENS = 4, 4, 8


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds, in batches of 16 completions.

    Attributes:
        draw_s: for one token of one completion.
        learn_s: for one completion of :data:`NUM_TOKENS` tokens, prompt included: forward and
            backward.
        prompt_tokens: mean length of the prompts tried.
    """

    draw_s: float
    learn_s: float
    prompt_tokens: float

    def rollout_s(self, completion_tokens: int) -> float:
        """One completion of so many tokens, drawn and learned from."""
        longer = (self.prompt_tokens + completion_tokens) / (self.prompt_tokens + NUM_TOKENS)
        return completion_tokens * self.draw_s + longer * self.learn_s


def measured_pace(
    model: str,
    tasks: Sequence[Task],
    settings: PromptSettings,
    *,
    device: Literal["auto", "cpu", "cuda"] | str = "auto",
) -> Pace:
    """Load the model and try a few tasks.

    Raises:
        ModelError, TaskError: as training and sampling would.
    """
    import torch

    from ttt_adapt.curriculum.decoding import (
        end_token_ids,
        left_padded,
        padding_token_id,
        position_ids,
        sample_token_ids,
        takes_position_ids,
        uniform_numbers,
    )
    from ttt_adapt.curriculum.prompts import fitting_prompts
    from ttt_adapt.models.loading import load_language_model

    lm = load_language_model(ModelSettings(name=model, device=device))
    prompts = fitting_prompts(
        lm.model, lm.tokenizer, tasks[:NUM_TASKS], settings, max_completion_tokens=NUM_TOKENS
    )
    numbers = [uniform_numbers(0, t.id, NUM_SAMPLES, NUM_TOKENS) for t in prompts.tasks]
    pad_id = padding_token_id(lm.tokenizer)
    num_rows = NUM_SAMPLES * len(prompts.tasks)
    started = time.monotonic()
    drawn = sample_token_ids(
        lm.model,
        prompts.token_ids,
        torch.stack(numbers),
        temperature=1.0,
        end_ids=end_token_ids(lm.model, lm.tokenizer),
        pad_id=pad_id,
    )
    draw_s = time.monotonic() - started
    num_tokens = sum(len(ids) for group in drawn for ids in group)
    rows = [
        [*prompt, *ids]
        for prompt, group in zip(prompts.token_ids, drawn, strict=True)
        for ids in group
    ]
    tokens_RL, mask_RL = left_padded(rows, pad_id, lm.model.device)
    options = {"position_ids": position_ids(mask_RL)} if takes_position_ids(lm.model) else {}
    started = time.monotonic()
    logits = lm.model(
        input_ids=tokens_RL, attention_mask=mask_RL, use_cache=False, **options
    ).logits
    logits.float().logsumexp(dim=-1).mean().backward()
    learn_s = time.monotonic() - started
    mean_prompt = sum(map(len, prompts.token_ids)) / len(prompts.token_ids)
    return Pace(draw_s / max(1, num_tokens), learn_s / num_rows, mean_prompt)
