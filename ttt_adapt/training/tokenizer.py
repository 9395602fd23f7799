"""Byte-level BPE, trained on a mixture's own text: every string has an encoding, none is unknown."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ttt_adapt.storage import atomic_path

BEGINNING = "<|endoftext|>"
"""Stands before every document, as in GPT-2: beginning and end of text are one token."""

PADDING = "<|padding|>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_bytes: int) -> Tokenizer:
    """Train on the first ``max_bytes`` of ``texts``; digits are single tokens, as Llama has them.

    Args:
        texts: documents; long ones are cut to 20 kB each, so that no book dominates.
        vocab_size: entries including the two special ones.
        max_bytes: UTF-8 bytes to learn merges from.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGINNING, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_limited(texts, max_bytes), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write ``tokenizer.json`` atomically."""
    with atomic_path(path) as temporary:
        tokenizer.save(str(temporary))


def _limited(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    used = 0
    for text in texts:
        piece = text[:20_000]
        used += len(piece.encode())
        yield piece
        if used >= max_bytes:
            return
