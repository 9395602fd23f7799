"""Settings of attempts at tasks: what the model reads, and how completions are drawn."""

from typing import Annotated, Literal

from pydantic import Field

from ttt_adapt.settings import Settings

PositiveInt = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0.0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class PromptSettings(Settings):
    """What a model reads before it answers. Owner: ``ttt_adapt.curriculum.prompts``."""

    chat: Literal["auto", "never"] = "auto"
    """``auto``: the tokenizer's chat template where it has one, else the beginning token and the
    prompt; ``never``: always the latter."""
    system_prompt: str = ""
    """First message of a chat; empty: none."""
    thinking: Literal["default", "on", "off"] = "default"
    """Handed to chat templates as ``enable_thinking``, for those that know it (Qwen3)."""
    max_prompt_tokens: PositiveInt = 2048
    """A task with a longer prompt is left out, and counted."""


class SamplingSettings(PromptSettings):
    """Attempts at tasks. Owner: ``ttt_adapt.curriculum.sampling``."""

    num_samples: PositiveInt = 4
    """Completions of each task."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.6
    """0: the likeliest token, so that one sample says it all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    """Draw from the fewest tokens that have this much probability together."""
    max_new_tokens: PositiveInt = 512
    batch_size: PositiveInt = 64
    """Completions at once."""
    num_verifiers: PositiveInt = 1
    """Completions verified at once."""
    seed: Seed = 0
