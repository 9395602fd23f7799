"""Does padding at the left change what a model predicts? It must not, or what is learned is wrong.

A model with absolute positions (GPT-2) counts them from a row's first column unless it is told
otherwise: the padding before a short prompt then shifts all its tokens. Here, wherever a padded
batch is read, position ids are given to models that take them, and others are held against this
test before anything is learned from them.

Shape legend: B rows, L tokens, V vocabulary.
"""

from typing import Any

import torch

from ttt_adapt.curriculum.decoding import (
    left_padded,
    padding_token_id,
    position_ids,
    sample_token_ids,
    takes_position_ids,
    uniform_numbers,
)
from ttt_adapt.errors import ModelError

_LONG, _SHORT, _CONTINUED = 12, 5, 4


@torch.no_grad()
def padding_error(model: Any, tokenizer: Any, *, give_positions: bool = True) -> float:
    """Largest difference of a token's log-probability, in nats, between a padded row and it alone.

    Args:
        give_positions: as training and sampling here do it; without, as GRPOTrainer does.
    """
    rows = _rows(model, tokenizer)
    pad_id = padding_token_id(tokenizer)
    options = give_positions and takes_position_ids(model)
    was_training = model.training
    model.eval()
    try:
        together = _log_probs(model, *left_padded(rows, pad_id, model.device), options)[:, -_SHORT:]
        alone = _log_probs(model, *left_padded(rows[1:], pad_id, model.device), options)
    finally:
        model.train(was_training)
    return float((together[1] - alone[0]).abs().max())


def check_padding_invariance(model: Any, tokenizer: Any) -> None:
    """Refuse a model whose predictions for a prompt change with padding at its left.

    Log-probabilities in one pass and greedy continuations from a cache are compared, with position
    ids given as training and sampling give them.

    Raises:
        ModelError: they differ by more than rounding.
    """
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25
    found = padding_error(model, tokenizer)
    kind = str(getattr(model.config, "model_type", type(model).__name__))
    if not found <= tolerance:
        raise ModelError(
            f"{kind}: padding at the left changes log-probabilities by {found:.2g} nats (at most "
            f"{tolerance:g} is rounding): the model neither takes position_ids nor finds positions "
            "from the attention mask; use one with rotary positions, or one that takes position_ids"
        )
    rows = _rows(model, tokenizer)
    options: dict[str, Any] = {
        "temperature": 0.0,
        "end_ids": (),
        "pad_id": padding_token_id(tokenizer),
    }
    numbers = uniform_numbers(0, "padding", 1, _CONTINUED)
    together = sample_token_ids(model, rows, torch.stack([numbers, numbers]), **options)
    alone = sample_token_ids(model, rows[1:], numbers[None], **options)
    # In half precision the likeliest of nearly equal tokens may change by rounding alone.
    if model.dtype == torch.float32 and together[1] != alone[0]:
        raise ModelError(
            f"{kind}: padding at the left changes what is generated from a cache; use a model "
            "whose cache respects the attention mask"
        )


def _rows(model: Any, tokenizer: Any) -> list[list[int]]:
    """A long and a short row of tokens that differ from each other and from padding."""
    num_tokens = int(model.get_input_embeddings().weight.shape[0])
    pad_id = padding_token_id(tokenizer)
    usable = [token for token in range(min(num_tokens, 64)) if token != pad_id] or [0]
    return [[usable[i % len(usable)] for i in range(start, start + length)]
            for start, length in ((1, _LONG), (3, _SHORT))]  # fmt: skip


def _log_probs(
    model: Any, tokens_BL: torch.Tensor, mask_BL: torch.Tensor, give_positions: bool
) -> torch.Tensor:
    options = {"position_ids": position_ids(mask_BL)} if give_positions else {}
    output = model(input_ids=tokens_BL, attention_mask=mask_BL, use_cache=False, **options)
    return torch.log_softmax(output.logits.float(), dim=-1)
