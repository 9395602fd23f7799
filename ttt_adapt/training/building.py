"""What a pretraining run begins with: a tokenizer, a model of the settings' shape, its weights, its
optimizers."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from ttt_adapt.config import PretrainSettings
from ttt_adapt.errors import ModelError
from ttt_adapt.models.checkpoints import (
    bundled_models,
    require_safetensors,
    resolve_model,
    weight_files,
)
from ttt_adapt.training.mixture import sampled_texts
from ttt_adapt.training.tokenizer import save_tokenizer, train_tokenizer

TOKENIZER_BYTES = 40_000_000
TIED = "lm_head.weight"

LAYER_TYPES = {
    "ttt-linear": "ttt_linear",
    "ttt-mlp": "ttt_mlp",
    "transformer": "attention",
    "linear-attention": "linear_attention",
}
"""Architectures of :class:`ttt_adapt.models.TTTForCausalLM`, and what mixes tokens in them."""

# A Llama's norms by our names.
_OF_LLAMA = (
    (r"\.input_layernorm\.", ".mixer_norm."),
    (r"\.post_attention_layernorm\.", ".mlp_norm."),
)
# What mixes tokens, by both.
_MIXER = re.compile(r"\.(self_attn|mixer|pre_conv)\.")


def obtain_tokenizer(
    settings: PretrainSettings, folder: Path, root: Path, report: Callable[[str], None]
) -> Tokenizer:
    """The tokenizer in ``folder``, another model's that the settings name, or one learned now; saved
    in ``folder``.

    Raises:
        ModelError: the named model has none, or a larger one than ``vocab_size``.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    named = settings.tokenizer or settings.initial_model
    if named:
        tokenizer = _tokenizer_of(named, settings.vocab_size)
        save_tokenizer(tokenizer, path)
        return tokenizer
    report("training the tokenizer")
    # Round-robin over the sources, so that the limit cuts none of them off.
    streams = [sampled_texts(source, settings.seed, root) for source in settings.sources]
    texts = (
        text for group in itertools.zip_longest(*streams) for text in group if text is not None
    )
    tokenizer = train_tokenizer(texts, vocab_size=settings.vocab_size, max_bytes=TOKENIZER_BYTES)
    save_tokenizer(tokenizer, path)
    return tokenizer


def _tokenizer_of(name: str, vocab_size: int) -> Tokenizer:
    path = Path(resolve_model(name)) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{name}: expected a bundled model ({', '.join(bundled_models())}) or a directory with "
            "tokenizer.json, found none"
        )
    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise ModelError(
            f"{name}: expected a tokenizer of at most vocab_size ({vocab_size}) entries, found "
            f"{size}; set vocab_size = {size}"
        )
    return tokenizer


def build_model(settings: PretrainSettings, seed: int) -> Any:
    """A model of the settings' architecture and shape with tied embeddings, initialised from
    ``seed``."""
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    shape: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "max_position_embeddings": settings.max_length,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": False,
    }
    torch.manual_seed(seed)
    if settings.architecture == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(num_key_value_heads=settings.num_heads, **shape, **tokens)
        )
    from ttt_adapt.models import TTTConfig, TTTForCausalLM

    mamba = settings.backbone == "mamba"
    config = TTTConfig(
        layer_types=LAYER_TYPES[settings.architecture],
        mini_batch_size=settings.mini_batch_size,
        base_lr=settings.base_lr,
        inner_norm=settings.inner_norm,
        learnable_w0=settings.learnable_w0,
        learnable_lr=settings.learnable_lr,
        feature_map=settings.feature_map,
        use_gate=mamba,
        share_qk=mamba,
        pre_conv=mamba,
        **shape,
        **tokens,
    )
    return TTTForCausalLM(config)


def load_initial_weights(model: Any, settings: PretrainSettings) -> None:
    """Give ``model`` the weights of ``settings.initial_model``, whatever their dtype: all, or those of
    ``settings.initial_parts``.

    Raises:
        ModelError: they are another shape's.
    """
    folder = Path(resolve_model(str(settings.initial_model)))
    require_safetensors(folder)
    weights = {k: v for path in weight_files(folder) for k, v in load_file(path).items()}
    own = model.state_dict()
    if settings.initial_parts != "all":
        weights = {k: v for k, v in weights.items() if not _MIXER.search(k)}
        if settings.architecture != "llama":
            weights = {_our_name(name): tensor for name, tensor in weights.items()}
        own = {k: v for k, v in own.items() if not _MIXER.search(k)}
    differing = sorted(
        name
        for name in own.keys() | weights.keys()
        if name != TIED
        and (name not in own or name not in weights or own[name].shape != weights[name].shape)
    )
    if differing:
        raise ModelError(
            f"{settings.initial_model}: expected the shape that the settings describe, but "
            f"{len(differing)} weights differ ({', '.join(differing[:3])}); "
            "give the sizes in its pretrain.toml"
        )
    model.load_state_dict(weights, strict=False)
    if settings.initial_parts != "all":
        # At their usual scale the convolutions before mixers drown what borrowed layers read; these
        # begin by adding nothing.
        for name, parameter in model.named_parameters():
            if ".pre_conv.conv." in name:
                nn.init.zeros_(parameter)


def _our_name(name: str) -> str:
    for pattern, replacement in _OF_LLAMA:
        name = re.sub(pattern, replacement, name)
    return name


def build_optimizers(settings: PretrainSettings, model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the linear layers inside the blocks and AdamW for the rest, or AdamW for all.

    Initial fast weights, gates, norms and convolutions are no matrices that map a hidden state to
    another: AdamW learns them, without decay.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    named = list(model.named_parameters())
    is_hidden = [id(p) in linear and "embed" not in name for name, p in named]
    hidden = [p for (_, p), inside in zip(named, is_hidden, strict=True) if inside]
    rest = [p for (_, p), inside in zip(named, is_hidden, strict=True) if not inside]
    rate, decay = settings.learning_rate, settings.weight_decay
    adamw: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-8}
    if settings.optimizer == "adamw":
        groups = [
            {"params": hidden, "weight_decay": decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, **adamw)]
    return [
        torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.0, **adamw),
    ]


def inner_base_lr(settings: PretrainSettings, step: int, num_steps: int, full: float) -> float:
    """η_base at outer step ``step`` (0-based): from ``base_lr_start`` up to ``full``, linearly.

    Source: Sun et al. 2024, arXiv 2407.04620, appendix C, "Learning rate for TTT".
    """
    start = settings.base_lr_start
    if start is None:
        return full
    num_warmup = max(1, round(num_steps * settings.base_lr_warmup_fraction))
    return start + (full - start) * min(1.0, step / num_warmup)
