"""What a model reads before it answers a task, as tokens; and which tasks it has room for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ttt_adapt.curriculum.sampling_settings import PromptSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import ModelError, TaskError
from ttt_adapt.models.language_model import beginning_token

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tasks with prompts that fit, and those left out.

    Attributes:
        tasks: in the order given.
        token_ids: of each task's prompt.
        too_long: ids of tasks left out, each with its prompt's number of tokens.
        limit: tokens that a prompt may have.
    """

    tasks: tuple[Task, ...]
    token_ids: tuple[tuple[int, ...], ...]
    too_long: dict[str, int]
    limit: int

    def summary(self) -> str:
        """One line on what was left out; empty if nothing was."""
        if not self.too_long:
            return ""
        longest = max(self.too_long, key=lambda task_id: self.too_long[task_id])
        return (
            f"{len(self.too_long)} of {len(self.tasks) + len(self.too_long)} tasks left out: "
            f"prompts of more than {self.limit} tokens (the longest, {longest!r:.80}, has "
            f"{self.too_long[longest]})"
        )


def prompt_token_ids(tokenizer: Any, text: str, settings: PromptSettings) -> list[int]:
    """A prompt as the model reads it: a chat's first turn, or the beginning token and the text.

    Raises:
        ModelError: the tokenizer has neither a beginning nor an end token, or its template
            refuses the messages.
    """
    if settings.chat == "auto" and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        if settings.system_prompt:
            messages.insert(0, {"role": "system", "content": settings.system_prompt})
        options = {}
        if settings.thinking != "default":
            options["enable_thinking"] = settings.thinking == "on"
        try:
            found = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, **options
            )
        except Exception as error:  # noqa: BLE001 - templates raise whatever they like
            raise ModelError(
                f"the tokenizer's chat template refuses the prompt: {' '.join(str(error).split())};"
                " set chat to 'never', or leave system_prompt empty"
            ) from None
        return [int(token) for token in found["input_ids"]]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [beginning_token(tokenizer), *ids]


def fitting_prompts(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    settings: PromptSettings,
    *,
    max_completion_tokens: int,
) -> Prompts:
    """Prompts as tokens, of the tasks whose prompt and completion the model has positions for.

    Raises:
        TaskError: no tasks, the same id twice, or not one prompt fits.
        ModelError: as :func:`prompt_token_ids`, or no room for any prompt.
    """
    if not tasks:
        raise TaskError("expected tasks, found none")
    if len({task.id for task in tasks}) < len(tasks):
        raise TaskError("expected tasks with ids of their own, found one id twice")
    positions = num_positions(model.config)
    limit = min(settings.max_prompt_tokens, positions - max_completion_tokens)
    if limit < 1:
        raise ModelError(
            f"the model has {positions} positions, which leaves no room for a prompt before "
            f"{max_completion_tokens} tokens of completion; allow fewer"
        )
    kept: list[Task] = []
    token_ids: list[tuple[int, ...]] = []
    too_long: dict[str, int] = {}
    for task in tasks:
        ids = prompt_token_ids(tokenizer, task.prompt, settings)
        if len(ids) > limit:
            too_long[task.id] = len(ids)
        else:
            kept.append(task)
            token_ids.append(tuple(ids))
    found = Prompts(tuple(kept), tuple(token_ids), too_long, limit)
    if not kept:
        raise TaskError(
            f"expected prompts of at most {limit} tokens, found none: {found.summary()}; raise "
            "max_prompt_tokens, or use a model with more positions"
        )
    return found


def num_positions(config: Any) -> int:
    """Tokens that the model has positions for; very many where it names no limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in _POSITION_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**30
