"""Small real models, built from configuration: no network, no downloads."""

from pathlib import Path
from typing import Any


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


def save_tiny_model(folder: Path, model: Any = None) -> Path:
    """``model``, or :func:`tiny_model` of seed 2, and its tokenizer in ``folder``."""
    (tiny_model(2) if model is None else model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> dict[str, Any]:
    """Every tensor of the model in ``folder`` by name, in its precision, on the CPU."""
    from ttt_adapt.config import ModelSettings
    from ttt_adapt.models import load_language_model

    loaded = load_language_model(ModelSettings(name=str(folder), device="cpu"))
    state: dict[str, Any] = loaded.model.state_dict()
    return state


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether names and tensors are equal, to the bit."""
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
