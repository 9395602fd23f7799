"""Continuing a prompt: greedy or sampled, seeded, without touching any global random state."""

from collections.abc import Sequence
from typing import Any

import torch

from ttt_adapt.errors import ModelError
from ttt_adapt.models.language_model import LanguageModel, beginning_token

# Enough tokens before the continuation for a decoder that joins words to know where it stands.
_DECODING_CONTEXT = 16


def generate(
    lm: LanguageModel,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    prefix: Sequence[int] = (),
) -> str:
    """Continue ``prompt`` until an end token or ``max_new_tokens``; return only the continuation.

    The model reads the beginning token, ``prefix`` and the prompt. What exceeds its positions is
    cut at the left: first of the prefix, then of the prompt.

    Args:
        temperature: 0 picks the likeliest token (ties: lowest id); above, samples.
        seed: of the sampling; equal seeds give equal texts.
        prefix: token ids to read before the prompt (in-context learning).

    Raises:
        ModelError: a negative temperature, no room for the continuation, or a prompt that has no
            UTF-8 form.
    """
    if not temperature >= 0.0:
        raise ModelError(f"temperature must be 0 or above, found {temperature}")
    if not 1 <= max_new_tokens < lm.max_length:
        raise ModelError(
            f"max_new_tokens must be between 1 and {lm.max_length - 1} for {lm.name}, "
            f"found {max_new_tokens}"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ModelError("prompt holds lone surrogates and has no UTF-8 form; clean it") from None
    prompt_ids = lm.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    room = lm.max_length - max_new_tokens - 1
    context = [*prefix, *prompt_ids]
    context = [beginning_token(lm.tokenizer), *(context[-room:] if room else [])]
    continuation = _continue(lm, context, max_new_tokens, temperature, seed)
    return _decode_continuation(lm.tokenizer, prompt_ids[-_DECODING_CONTEXT:], continuation)


@torch.no_grad()
def _continue(
    lm: LanguageModel, context: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ends = _end_tokens(lm)
    tokens = torch.tensor([context], device=lm.model.device)
    cache: Any = None
    found: list[int] = []
    while len(found) < num_tokens:
        output = lm.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[0, -1].float().cpu()
        shares = torch.softmax(logits.double() / (temperature or 1.0), dim=-1)
        # Of NaN, argmax would make a token too.
        if not bool(torch.isfinite(shares).all()):
            raise ModelError(f"{lm.name} predicts no finite probabilities; check its weights")
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(shares, 1, generator=generator))
        if token in ends:
            break
        found.append(token)
        tokens = torch.tensor([[token]], device=lm.model.device)
    return found


def _end_tokens(lm: LanguageModel) -> set[int]:
    """End tokens of the tokenizer and of the model's generation settings (one id or a list)."""
    configured = getattr(getattr(lm.model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {int(i) for i in (*ids, lm.tokenizer.eos_token_id) if i is not None}


def _decode_continuation(tokenizer: Any, before: list[int], continuation: list[int]) -> str:
    """Decode with some context: sentence-piece decoders drop a space at the start of a text."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    known: str = tokenizer.decode(before, **options)
    whole: str = tokenizer.decode([*before, *continuation], **options)
    if whole.startswith(known):
        return whole[len(known) :]
    alone: str = tokenizer.decode(continuation, **options)
    return alone
