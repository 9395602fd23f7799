"""Completions of many prompts at once, each from random numbers of its own.

Prompts are padded at the left and read once, however many completions each is to have; finished
completions leave the batch. Every completion has its own stream of uniform numbers, and a token is
drawn by inverting the distribution at one of them: what is drawn for a task does not depend on the
tasks beside it (but for rounding, which may differ between batches).

Shape legend: P prompts, N completions of each, R = P·N rows, L prompt tokens, T tokens of a
completion, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ttt_adapt.errors import ModelError
from ttt_adapt.runtime import derived_seed

_LEAVING = 0.75
"""Share of the cache's rows still needed, from which on down the others are dropped: copying a large
cache at every end token would cost more than reading padding."""


def uniform_numbers(seed: int, key: str, num_samples: int, num_tokens: int) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 ``[num_samples, num_tokens]``: one row a completion.

    Row j depends on ``seed``, ``key`` and j alone, so that more samples begin with the same ones.
    """
    rows = torch.empty(num_samples, num_tokens, dtype=torch.float64)
    for number in range(num_samples):
        generator = torch.Generator().manual_seed(derived_seed(seed, key, number))
        torch.rand(num_tokens, generator=generator, dtype=torch.float64, out=rows[number])
    return rows


@torch.no_grad()
def sample_token_ids(
    model: Any,
    prompts: Sequence[Sequence[int]],
    uniforms_PNT: torch.Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    end_ids: Sequence[int],
    pad_id: int,
) -> list[list[list[int]]]:
    """Token ids of N completions of each prompt: up to and with an end token, at most T.

    Args:
        prompts: token ids of each, at least one.
        uniforms_PNT: float64, see :func:`uniform_numbers`.
        temperature: 0 takes the likeliest token (ties: lowest id).
        top_p: draw from the fewest tokens that have this much probability together.
        end_ids: end a completion.
        pad_id: any token that the model knows; masked wherever it stands.

    Raises:
        ModelError: the model predicts NaN or infinity.
    """
    num_prompts, num_samples, num_tokens = uniforms_PNT.shape
    device = model.device
    uniforms_RT = uniforms_PNT.flatten(0, 1).to(device)
    ends = torch.tensor(list(end_ids), device=device)
    was_training = model.training
    model.eval()
    try:
        state = _Prefix(model, prompts, num_samples, pad_id)
        tokens_RT = torch.full((num_prompts * num_samples, num_tokens), pad_id, device=device)
        lengths_R = torch.full((num_prompts * num_samples,), num_tokens, device=device)
        alive = torch.arange(num_prompts * num_samples, device=device)
        for position in range(num_tokens):
            uniforms = uniforms_RT[alive, position]
            tokens = draw_tokens(state.logits, uniforms, temperature=temperature, top_p=top_p)
            tokens_RT[alive, position] = tokens
            ended = torch.isin(tokens, ends)
            if position + 1 == num_tokens:
                lengths_R[alive] = num_tokens
                break
            if bool(ended.any()):
                lengths_R[alive[ended]] = position + 1
                rest = (~ended).nonzero().flatten()
                alive, tokens = alive[rest], tokens[rest]
                if len(alive) == 0:
                    break
                state.keep(rest)
            state.read(tokens)
    finally:
        model.train(was_training)
    rows, lengths = tokens_RT.tolist(), lengths_R.tolist()
    found = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return [found[start : start + num_samples] for start in range(0, len(found), num_samples)]


def draw_tokens(
    logits_RV: torch.Tensor, uniforms_R: torch.Tensor, *, temperature: float, top_p: float = 1.0
) -> torch.Tensor:
    """One token a row, int64 ``[R]``: the distribution inverted at each row's uniform number.

    Raises:
        ModelError: a row without finite probabilities.
    """
    logits_RV = logits_RV.float()
    if temperature == 0.0:
        tokens = logits_RV.argmax(dim=-1)
        # Of NaN, argmax would make a token too.
        if not bool(torch.isfinite(logits_RV.amax(dim=-1)).all()):
            raise ModelError("the model predicts no finite probabilities; check its weights")
        return tokens
    shares_RV = torch.softmax((logits_RV / temperature).double(), dim=-1)
    if top_p < 1.0:
        sorted_RV, order_RV = shares_RV.sort(dim=-1, descending=True, stable=True)
        before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
        sorted_RV = sorted_RV.masked_fill(before_RV >= top_p, 0.0)
        return order_RV.gather(-1, _inverted(sorted_RV, uniforms_R)[:, None])[:, 0]
    return _inverted(shares_RV, uniforms_R)


def _inverted(shares_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    cumulated_RV = shares_RV.cumsum(dim=-1)
    totals_R = cumulated_RV[:, -1]
    if not bool(torch.isfinite(totals_R).all()):
        raise ModelError("the model predicts no finite probabilities; check its weights")
    # The first token whose cumulated share is above: never one without any share.
    found = torch.searchsorted(cumulated_RV, (uniforms_R * totals_R)[:, None], right=True)[:, 0]
    return found.clamp_(max=shares_RV.shape[-1] - 1)


class _Prefix:
    """What the rows have read so far: keys and values, mask, positions, and logits after it."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], num_samples: int, pad_id: int
    ) -> None:
        self.model = model
        self.takes_positions = takes_position_ids(model)
        self.limits_logits = "logits_to_keep" in forward_parameters(model)
        tokens_PL, mask_PL = left_padded(prompts, pad_id, model.device)
        self.cache: Any = None
        self.mask = mask_PL
        self.next_position = mask_PL.sum(dim=1)
        self.logits = self._forward(tokens_PL, position_ids(mask_PL))
        self.has_rows = _has_rows(self.cache)
        if num_samples > 1 and not self.has_rows:
            # A cache that cannot be repeated row by row: every completion reads the prompt itself.
            self.cache, self.mask = None, mask_PL.repeat_interleave(num_samples, dim=0)
            rows = tokens_PL.repeat_interleave(num_samples, dim=0)
            self.logits = self._forward(rows, position_ids(self.mask))
            self.next_position = self.mask.sum(dim=1)
        elif num_samples > 1:
            cache: Any = self.cache
            cache.batch_repeat_interleave(num_samples)
            self.mask = mask_PL.repeat_interleave(num_samples, dim=0)
            self.next_position = self.next_position.repeat_interleave(num_samples)
            self.logits = self.logits.repeat_interleave(num_samples, dim=0)
        self.rows = torch.arange(len(self.mask), device=model.device)

    def keep(self, rows: torch.Tensor) -> None:
        """Only these rows read on; the others leave the cache once they are enough of it."""
        self.rows = self.rows[rows]
        if self.has_rows and len(self.rows) <= _LEAVING * len(self.mask):
            self.cache.batch_select_indices(self.rows)
            self.mask, self.next_position = self.mask[self.rows], self.next_position[self.rows]
            self.rows = torch.arange(len(self.rows), device=rows.device)

    def read(self, tokens_R: torch.Tensor) -> None:
        tokens = torch.zeros(len(self.mask), 1, dtype=torch.int64, device=self.mask.device)
        tokens[self.rows, 0] = tokens_R
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.logits = self._forward(tokens, self.next_position[:, None])[self.rows]
        self.next_position = self.next_position + 1

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        if self.limits_logits:
            options["logits_to_keep"] = 1
        output = self.model(
            input_ids=tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        self.cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: Any = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, int64 ``[P, L]``; padding comes first."""
    length = max(len(ids) for ids in prompts)
    tokens = [[pad_id] * (length - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def position_ids(mask_RL: torch.Tensor) -> torch.Tensor:
    """Positions counted from each row's first token, int64 ``[R, L]``; 0 where there is padding."""
    return (mask_RL.long().cumsum(dim=-1) - 1).clamp_(min=0)


def takes_position_ids(model: Any) -> bool:
    """Whether the model can be told positions; if not, it must find them from the mask."""
    return "position_ids" in forward_parameters(model)


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """End tokens of the tokenizer and of the model's generation settings, sorted."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None})


def padding_token_id(tokenizer: Any) -> int:
    """A token to fill rows with: the tokenizer's, else its end token, else 0."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _has_rows(cache: Any) -> bool:
    """Whether a cache is plain keys and values, whose rows can be repeated and left out."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return type(cache) is DynamicCache and all(type(layer) in plain for layer in cache.layers)


def forward_parameters(model: Any) -> set[str]:
    """Names of what the model's forward pass takes, an adapter around it looked through."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return set(inspect.signature(type(base).forward).parameters)
