"""Transformers for embedding: found, checked, loaded without a word to the terminal."""

import json
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.embedding.fingerprint import model_fingerprint
from ttt_adapt.embedding.pooling import DenseLayer, Head
from ttt_adapt.embedding.recipe import SentenceRecipe, read_recipe
from ttt_adapt.embedding.resolution import (
    ModelFolder,
    find_causal_model,
    find_sentence_model,
    weight_files,
)
from ttt_adapt.embedding.tokenization import TextTokenizer
from ttt_adapt.embedding.transformer import TransformerEmbedder
from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.runtime import (
    keep_freed_memory,
    quiet_transformers,
    resolve_device,
    uses_bfloat16,
)

_NO_LIMIT = 10**9
"""Tokenizers without a limit of their own say 10^30."""


def load_sentence_transformer(settings: EmbeddingSettings) -> TransformerEmbedder:
    """A sentence-transformers model; see :func:`ttt_adapt.embedding.load_embedder`."""
    found = find_sentence_model(settings.model, remote_code=settings.trust_remote_code)
    return _load(found, read_recipe(found.path), settings)


def load_causal_lm(settings: EmbeddingSettings) -> TransformerEmbedder:
    """The last hidden states of a causal language model, pooled as ``settings.pooling`` says."""
    found = find_causal_model(settings.model, remote_code=settings.trust_remote_code)
    recipe = SentenceRecipe(found.path, None, False, "", (settings.pooling,), ())
    named = ModelFolder(found.path, f"{found.name}, {settings.pooling} of hidden states")
    return _load(named, recipe, settings)


def _load(
    found: ModelFolder, recipe: SentenceRecipe, settings: EmbeddingSettings
) -> TransformerEmbedder:
    folder = recipe.transformer
    weights = weight_files(folder)
    _check_config(folder / "config.json")
    device = _checked_device(settings.device)
    keep_freed_memory()
    model, tokenizer = _load_transformer(folder, trusted=settings.trust_remote_code)
    if recipe.lower_case:
        _lower_case(tokenizer)
    max_tokens = _max_tokens(settings.max_tokens, recipe.max_tokens, model, tokenizer)
    dtype = _dtype(settings.dtype, device)
    fingerprint = model_fingerprint(
        folder,
        weights,
        [step.weights for step in recipe.steps if isinstance(step, DenseLayer)],
        kind=settings.kind,
        pooling=recipe.poolings,
        steps=[step if isinstance(step, str) else step.activation for step in recipe.steps],
        prompt=recipe.prompt,
        lower_case=recipe.lower_case,
        max_tokens=max_tokens,
        dtype=str(dtype),
    )
    return TransformerEmbedder(
        model.to(device),
        TextTokenizer(tokenizer, max_tokens),
        Head(recipe.poolings, recipe.steps).eval().to(device),
        name=found.name,
        fingerprint=fingerprint,
        dtype=dtype,
        device=device,
        batch_size=settings.batch_size,
        prompt=recipe.prompt,
    )


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected the model's configuration: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(config).__name__}")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{path}: an encoder-decoder; choose an encoder or a decoder")


def _load_transformer(folder: Path, *, trusted: bool) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer

    # ImportError: the tokenizer needs a package; RuntimeError: tensors of another shape.
    failures = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
            model, report = AutoModel.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=trusted,
                output_loading_info=True,
            )
    except failures as error:
        if not trusted and _brings_code(folder):
            raise ModelError(
                f"{folder}: this model brings Python code of its own; set trust_remote_code after "
                "reading it, or choose another model"
            ) from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{folder}: cannot be loaded: {reason}") from error
    # transformers fills missing weights with random numbers. A pooler is not used here.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} weights are missing ({', '.join(missing[:3])}, …); the file "
            "is incomplete or of another architecture than config.json says"
        )
    return model.eval(), tokenizer


def _brings_code(folder: Path) -> bool:
    paths = [folder / name for name in ("config.json", "tokenizer_config.json")]
    return any(b'"auto_map"' in path.read_bytes() for path in paths if path.is_file())


def _lower_case(tokenizer: Any) -> None:
    from tokenizers import normalizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("do_lower_case needs a fast tokenizer; choose a model with one")
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def _max_tokens(asked: int | None, stated: int | None, model: Any, tokenizer: Any) -> int:
    """Tokens of a text to read: what was asked for, else what the model's folder states."""
    positions = getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT
    if positions < 0:
        positions = _NO_LIMIT
    known = min(positions, tokenizer.model_max_length or _NO_LIMIT)
    if asked is not None:
        if asked > known:
            raise SettingsError(
                f"max_tokens {asked} exceeds the {known} positions that the model knows; "
                f"set at most {known}"
            )
        return asked
    limit = stated or known
    if limit >= _NO_LIMIT:
        raise SettingsError("the model states no limit of its own; set max_tokens")
    return limit


def _dtype(name: str, device: str) -> torch.dtype:
    return torch.bfloat16 if uses_bfloat16(name, device) else torch.float32


def _checked_device(name: str) -> str:
    device = resolve_device(name)
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ModelError(f"unknown device {name!r}; use auto, cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r}: this machine has no CUDA device; use device='cpu'")
    return device
