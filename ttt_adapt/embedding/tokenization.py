"""Token ids of the beginning of a text, reading only as much of the text as they take.

A tokenizer told to truncate still tokenises everything first: a megabyte costs a second to keep 256
tokens of it. Here a long text is cut by characters before. A cut may change the tokens near it, so
one is accepted only if the tokens kept end well before it; otherwise four times as many characters
are tried, up to the whole text. The result always equals that of the whole text:

- pre-tokenisers decide on word boundaries from a few neighbouring characters, so every word but the
  last few before the cut is the same word in the whole text, and words are tokenised one by one;
- a special token's name split by the cut is shorter than :attr:`_margin`;
- some pre-tokenisers group digits from the right, so a run of digits reaching the cut is not kept.

A tokenizer that treats the whole text as one word therefore reads all of it.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import ModelError, SettingsError

CHARACTERS_PER_TOKEN = 8
"""First cut: about twice what prose or code needs, so that one try is enough almost always."""
GROWTH = 4
UNSETTLED_WORDS = 3
UNSETTLED_CHARACTERS = 16
TEXTS_PER_CALL = 256
"""Bounds the memory of the tokenizer's own records, some hundred bytes a token."""


class TextTokenizer:
    """The first ``max_tokens`` token ids of texts, special tokens included."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        """
        Args:
            tokenizer: of transformers. This object takes over its truncation and padding state.
            max_tokens: ids a text at most.

        Raises:
            SettingsError: ``max_tokens`` leaves no room beside the special tokens.
        """
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if isinstance(backend, Tokenizer) else None
        num_special = tokenizer.num_special_tokens_to_add(False)
        self._room = max_tokens - num_special
        if self._room < 1:
            raise SettingsError(
                f"max_tokens {max_tokens} leaves no room for text beside {num_special} special "
                f"tokens; set at least {num_special + 1}"
            )
        names = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        self._margin = UNSETTLED_CHARACTERS + max(map(len, names), default=0)
        self._first_cut = max(CHARACTERS_PER_TOKEN * self._room, 4 * self._margin)

    def __call__(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, int64 ``[1 … max_tokens]``.

        A text without tokens, where the tokenizer adds none of its own, stands as the single
        token that begins (or else ends) a text.
        """
        return [self._not_empty(ids) for ids in self._token_ids(iter(texts))]

    def _token_ids(self, texts: Iterator[str]) -> Iterator[list[int]]:
        if self._backend is None:
            for text in texts:
                yield self._tokenizer(text, truncation=True, max_length=self._max_tokens).input_ids
            return
        # transformers and tokenizer.json both leave truncation and padding behind.
        self._backend.no_truncation()
        self._backend.no_padding()
        while group := list(islice(texts, TEXTS_PER_CALL)):
            short = [text for text in group if len(text) <= self._first_cut]
            encodings = iter(self._backend.encode_batch_fast(short, add_special_tokens=False))
            for text in group:
                fits = len(text) <= self._first_cut
                yield self._finish(next(encodings) if fits else self._encode_start(text))

    def _encode_start(self, text: str) -> Any:
        assert self._backend is not None
        cut = self._first_cut
        while cut < len(text):
            start = text[:cut]
            encoding = self._backend.encode(start, add_special_tokens=False)
            if self._is_settled(start, encoding):
                return encoding
            cut *= GROWTH
        return self._backend.encode(text, add_special_tokens=False)

    def _is_settled(self, start: str, encoding: Any) -> bool:
        """Whether the tokens to keep would be the same had the text not been cut."""
        if len(encoding.ids) < self._room:
            return False
        edge = len(start) - self._margin
        while edge > 0 and start[edge - 1].isdigit():
            edge -= 1
        word_ids = encoding.word_ids
        word, last_word = word_ids[self._room - 1], word_ids[-1]
        if word is None or last_word is None or word > last_word - UNSETTLED_WORDS:
            return False
        return bool(encoding.offsets[self._room - 1][1] <= edge)

    def _finish(self, encoding: Any) -> list[int]:
        assert self._backend is not None
        if len(encoding.ids) > self._room:
            encoding.truncate(self._room)
        ids: list[int] = self._backend.post_process(encoding, None, True).ids
        return ids

    def _not_empty(self, ids: list[int]) -> NDArray[np.int64]:
        if not ids:
            for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
                if token is not None:
                    ids = [token]
                    break
            else:
                raise ModelError(
                    "an empty text has no tokens and this tokenizer names none that begins or ends "
                    "a text; leave empty texts out"
                )
        return np.asarray(ids, dtype=np.int64)


def length_sorted_batches(
    lengths: Sequence[int], *, batch_size: int, token_budget: int
) -> Iterator[list[int]]:
    """Positions in batches of similar length, the longest first; ties keep their order.

    The longest first, so that memory peaks at once and the time left is not underestimated.

    Args:
        lengths: tokens of each text.
        batch_size: texts a batch at most.
        token_budget: tokens a batch at most, padding included; a batch holds one text at least.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    start = 0
    while start < len(order):
        longest = max(lengths[order[start]], 1)
        size = max(min(batch_size, token_budget // longest), 1)
        yield order[start : start + size]
        start += size
