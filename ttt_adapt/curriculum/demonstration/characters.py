"""A small language model of characters: its tokenizer, its shape, and where it is loaded from.

Llama's architecture, whose rotary positions are relative: prompts padded on the left mean the same.
"""

from pathlib import Path
from typing import Any

SPECIAL = ("<begin>", "<end>", "<pad>", "<unknown>")
"""Begin a text, end it, fill a batch, stand for a character that is not known: tokens 0 to 3."""
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz =\n"
"""What it can read and write; other characters are unknown to it."""
WIDTH, NUM_LAYERS, NUM_HEADS, MLP_WIDTH = 64, 3, 4, 176
MAX_LENGTH = 64


def character_tokenizer() -> Any:
    """One token a character, nothing added before or after: a ``PreTrainedTokenizerFast`` that
    pads on the left."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    begin, end, pad, unknown = SPECIAL
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    return make(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        unk_token=unknown,
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )


def character_model(seed: int) -> Any:
    """An untrained ``LlamaForCausalLM`` of about 160,000 weights.

    Args:
        seed: of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def save_character_model(model: Any, folder: Path) -> None:
    """Write model and tokenizer where ``load_language_model`` and ``transformers`` find both."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    # It is written in a blink, and a bar would be in the way of ours.
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
