"""A causal language model with its tokenizer, its identity and its limit."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from ttt_adapt.errors import ModelError
from ttt_adapt.storage import stable_hash

MAX_LENGTH_CAP = 2048
"""Windows and chunks are never longer than this by default: attention over the 128k positions
that some models claim would cost more than all the rest together."""

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A causal language model, ready to score and to adapt.

    Attributes:
        model: a ``transformers.PreTrainedModel`` with a language-modelling head, in eval mode.
        tokenizer: its tokenizer.
        name: as it was asked for.
        fingerprint: SHA-256 over weights, configuration, tokenizer and dtype. Equal fingerprints
            mean interchangeable results.
        max_length: tokens per window or chunk, the beginning token not counted twice: what the
            model's positions allow, at most :data:`MAX_LENGTH_CAP`.
    """

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str
    max_length: int


def wrap_language_model(model: Any, tokenizer: Any, *, name: str) -> LanguageModel:
    """A :class:`LanguageModel` of modules that are already in memory.

    The fingerprint covers the weights' present bytes; the model is put in eval mode.

    Raises:
        ModelError: the tokenizer has no beginning token, or the model lacks rows for its tokens.
    """
    beginning_token(tokenizer)
    require_vocabulary(model, tokenizer, name)
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        content = value.detach().cpu().contiguous()
        digest.update(f"{key}:{content.dtype}:{tuple(content.shape)}\n".encode())
        digest.update(content.view(-1).view(torch.uint8).numpy().data)
    fingerprint = stable_hash(
        {
            "weights": digest.hexdigest(),
            "config": json.loads(model.config.to_json_string(use_diff=False)),
            "tokenizer": tokenizer_hash(tokenizer),
        }
    )
    return LanguageModel(model.eval(), tokenizer, name, fingerprint, position_limit(model.config))


def beginning_token(tokenizer: Any) -> int:
    """The token that texts and chunks are preceded by, so that their first token is a target.

    Raises:
        ModelError: the tokenizer has neither a beginning nor an end token.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ModelError(
        "expected a tokenizer with a beginning (bos) or end (eos) token, found neither; "
        "set tokenizer.eos_token and save the tokenizer again"
    )


def position_limit(config: Any) -> int:
    """Tokens the model has positions for, at most :data:`MAX_LENGTH_CAP`."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in _POSITION_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return min(value, MAX_LENGTH_CAP)
    return MAX_LENGTH_CAP


def require_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that makes tokens the model has no embedding for.

    Raises:
        ModelError: with both sizes.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"{name}: the tokenizer makes token {largest}, the model knows {rows} tokens; "
            "use the tokenizer the model was trained with"
        )


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of everything that decides how a text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are per-call state of the backend, not part of the tokenizer.
    state = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    if backend is not None:
        state.pop("truncation", None)
        state.pop("padding", None)
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return stable_hash({"tokenizer": state, "special": special})
