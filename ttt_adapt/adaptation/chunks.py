"""Passages as token chunks: what one optimizer step learns from, or what is read as a prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ttt_adapt.models import beginning_token

_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The chunks of a query's passages, in training order.

    Attributes:
        chunks: token ids ``[1 + n]`` each: the beginning token, then ``n <= max_length`` targets.
        ends: ``ends[k]`` chunks make up the first ``k`` passages; ``ends[0] == 0``. A passage
            without tokens has no chunks and still counts as one.
    """

    chunks: tuple[torch.Tensor, ...]
    ends: tuple[int, ...]

    @property
    def num_passages(self) -> int:
        return len(self.ends) - 1

    def num_chunks(self, step: int) -> int:
        """Optimizer steps that ``step`` passages take."""
        return self.ends[min(step, self.num_passages)]

    def passages_done(self, num_chunks: int, step: int) -> int:
        """Passages, at most ``step``, that ``num_chunks`` optimizer steps have wholly covered."""
        reached = min(step, self.num_passages)
        while self.ends[reached] > num_chunks:
            reached -= 1
        return reached


def make_curriculum(
    tokenizer: Any, texts: Sequence[str], *, max_length: int, epochs: int, most: int
) -> Curriculum:
    """Cut texts into chunks of at most ``max_length`` targets, each after the beginning token.

    Args:
        epochs: how often to go through the texts.
        most: passages that will be learned from at most; later ones are not tokenised.
    """
    beginning = beginning_token(tokenizer)
    chunks: list[torch.Tensor] = []
    ends = [0]
    by_text: list[list[torch.Tensor]] = []
    for position in range(min(len(texts) * epochs, most)):
        if position < len(texts):
            by_text.append(_pieces(tokenizer, texts[position], beginning, max_length))
        chunks += by_text[position % len(texts)]
        ends.append(len(chunks))
    return Curriculum(tuple(chunks), tuple(ends))


def make_prefix(tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> tuple[int, ...]:
    """Token ids of ``texts`` (nearest first) to read before a query: the nearest one last.

    Passages are separated, and ended, by an empty line. A text that comes again, as a copy in the
    corpus or as one of SIFT's repeats, is read once. When there are more than ``max_tokens``
    tokens, the farthest passages go first; the last that fits in part is cut at its left. The
    beginning token is not included.
    """
    separator = _token_ids(tokenizer, _SEPARATOR)
    found: list[int] = []
    for text in dict.fromkeys(texts):
        if len(found) >= max_tokens:
            break
        found = [*_token_ids(tokenizer, text), *separator, *found]
    return tuple(found[max(0, len(found) - max_tokens) :])


def _pieces(tokenizer: Any, text: str, beginning: int, max_length: int) -> list[torch.Tensor]:
    ids = _token_ids(tokenizer, text)
    return [
        torch.tensor([beginning, *ids[start : start + max_length]])
        for start in range(0, len(ids), max_length)
    ]


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
