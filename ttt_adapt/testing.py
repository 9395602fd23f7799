"""Small real models and texts for tests: built from configuration, no network, no downloads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.types import Passage

WORDS = ("alpha", "beta", "kernel", "matrix", "vector", "query", "river", "mountain", "garden",
         "winter", "def", "return", "import", "class", "for", "while", "print", "value", "number",
         "string", "table", "window", "engine")  # fmt: skip


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer with one token a byte: 256 bytes and two special tokens.

    Token 0 is ``<|endoftext|>`` (beginning and end), token 1 ``<|padding|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, "<|padding|>": 1}
    vocabulary.update({symbol: 2 + position for position, symbol in enumerate(alphabet)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    return make(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
    )


def tiny_model(seed: int = 0, *, max_length: int = 128, architecture: str = "llama") -> Any:
    """A two-layer causal language model of width 32 over :func:`tiny_tokenizer`, in eval mode.

    Args:
        seed: of the initial weights.
        max_length: positions the model knows.
        architecture: ``llama``, ``gpt2``, ``ttt_linear`` or ``ttt_mlp``.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config: Any
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=258, n_positions=max_length, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **tokens,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
    elif architecture.startswith("ttt_"):
        return tiny_ttt_model(seed, layer_types=architecture, max_position_embeddings=max_length)
    else:
        config = transformers.LlamaConfig(
            vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=max_length,
            tie_word_embeddings=True, **tokens,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    return model.eval()


def tiny_ttt_model(seed: int = 0, **options: Any) -> Any:
    """A two-layer TTT-Linear model of width 32 over :func:`tiny_tokenizer`, in eval mode, whose
    weights are large enough for its predictions to differ from token to token.

    Args:
        seed: of the weights.
        options: of :class:`ttt_adapt.models.TTTConfig`, in the place of its defaults here.
    """
    import torch

    from ttt_adapt.models import TTTConfig, TTTForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "mini_batch_size": 4, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    model: Any = TTTForCausalLM(TTTConfig(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def tiny_attention_model(architecture: str, seed: int = 0) -> Any:
    """Three layers of softmax attention of width 32, as transformers has it, in eval mode, with
    weights large enough for predictions to differ from token to token.

    Args:
        architecture: ``gpt2``, or with two heads for each key-value head ``llama``, ``mistral``
            (which sees a sliding window), ``qwen2`` or ``qwen3`` (which norms q and k).
        seed: of the weights.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    special: dict[str, Any] = {
        "mistral": {"sliding_window": 8, "head_dim": None},
        "qwen3": {"head_dim": 12},
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    sizes: dict[str, Any] = {
        "vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
        "tie_word_embeddings": True, **special.get(architecture, {}),
    }  # fmt: skip
    if architecture != "gpt2":
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    make: Any = transformers.AutoModelForCausalLM.from_config  # it has no types
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def sample_text(seed: int, num_words: int = 60) -> str:
    """Words in a seeded order: different seeds share a vocabulary, not sentences."""
    import random

    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


class HashedWords:
    """A weight-free :class:`ttt_adapt.types.Embedder`: a seeded random direction for each word.

    Needs numpy only and gives the same bytes in every process, whatever the batch.
    """

    def __init__(self, dimension: int = 32) -> None:
        self.dimension = dimension
        self.fingerprint = f"{dimension:064x}"
        self.description = f"hashed words, {dimension} dimensions"
        self._directions: dict[str, NDArray[np.float32]] = {}

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row] += self._direction(word)
            vectors[row] += 1e-3 * self._direction(text)
            vectors[row] /= np.linalg.norm(vectors[row])
            if progress is not None:
                progress(1)
        return vectors

    def _direction(self, word: str) -> NDArray[np.float32]:
        direction = self._directions.get(word)
        if direction is None:
            generator = np.random.default_rng(list(word.encode("utf-8", "surrogatepass")))
            direction = generator.standard_normal(self.dimension).astype(np.float32)
            if len(word) < 24:
                self._directions[word] = direction
        return direction


def sample_passages(num_documents: int, *, first: int = 0) -> Iterator[Passage]:
    """Three passages of twelve words for each of ``num_documents`` documents from ``first`` on."""
    for document in range(first, first + num_documents):
        for ordinal in range(3):
            yield Passage(
                id=f"document-{document}#{ordinal}",
                document_id=f"document-{document}",
                ordinal=ordinal,
                text=sample_text(3 * document + ordinal, 12),
                source=f"words.txt:{document}",
                subset=f"subset-{document % 2}",
            )
