"""How a sentence-transformers folder wants its vectors made: ``modules.json`` and what it names.

Read here instead of by sentence-transformers' own class, whose import alone costs several seconds
of processor time. What this cannot reproduce it refuses.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.embedding.pooling import ACTIVATIONS, POOLINGS, DenseLayer
from ttt_adapt.errors import ModelError

_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class SentenceRecipe:
    """What is done around the transformer.

    Attributes:
        transformer: the folder of its weights and tokenizer.
        max_tokens: tokens of a text it reads; ``None``: the tokenizer's and the model's limit.
        lower_case: whether texts are lower-cased before the tokenizer's own normalisation.
        prompt: put before every text.
        poolings: names of :data:`ttt_adapt.embedding.pooling.POOLINGS`.
        steps: what follows pooling: projections, and ``"normalize"``.
    """

    transformer: Path
    max_tokens: int | None
    lower_case: bool
    prompt: str
    poolings: tuple[str, ...]
    steps: tuple[DenseLayer | str, ...]


def read_recipe(folder: Path) -> SentenceRecipe:
    """Read a model's folder; one without ``modules.json`` is a plain transformer, mean-pooled.

    Raises:
        ModelError: a file is not as sentence-transformers writes it, points outside the folder, or
            asks for something that this library does not do.
    """
    if not (folder / "modules.json").is_file():
        return SentenceRecipe(folder, None, False, "", ("mean",), ())
    modules = _read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{folder / 'modules.json'}: expected a list of modules")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ModelError(
            f"{folder}: expected modules Transformer, Pooling, …, found {', '.join(kinds)}; "
            "choose a transformer that pools its tokens"
        )
    places = [_inside(folder, str(module.get("path", ""))) for module in modules]
    settings = _transformer_settings(places[0])
    max_tokens = settings.get("max_seq_length")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens > 0):
        raise ModelError(f"{folder}: expected max_seq_length as a count, found {max_tokens!r}")
    return SentenceRecipe(
        transformer=places[0],
        max_tokens=max_tokens,
        lower_case=bool(settings.get("do_lower_case", False)),
        prompt=_default_prompt(folder),
        poolings=_poolings(places[1]),
        steps=tuple(
            _step(kind, place)
            for kind, place in zip(kinds[2:], places[2:], strict=True)
            if kind != "Dropout"
        ),
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a JSON file: {error}") from None


def _read_table(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _inside(folder: Path, name: str) -> Path:
    place = folder / name
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{folder / 'modules.json'}: {name!r} points outside the model's folder")
    return place


def _transformer_settings(folder: Path) -> dict[str, Any]:
    # Named after the architecture in old models: sentence_bert_config.json, sentence_roberta_….
    for path in sorted(folder.glob("sentence_*_config.json")):
        return _read_table(path)
    return {}


def _default_prompt(folder: Path) -> str:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return ""
    settings = _read_table(path)
    name = settings.get("default_prompt_name")
    return str((settings.get("prompts") or {}).get(name) or "") if name else ""


def _poolings(folder: Path) -> tuple[str, ...]:
    settings = _read_table(folder / "config.json")
    if not settings.get("include_prompt", True):
        raise ModelError(
            f"{folder}: leaves its prompt out of pooling, which is not supported; choose a model "
            "with include_prompt true"
        )
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _LEGACY_POOLING.items() if settings.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    for mode in modes:
        if mode not in POOLINGS:
            raise ModelError(
                f"{folder}: unknown pooling {mode!r}; known are {', '.join(sorted(POOLINGS))}"
            )
    return tuple(modes)


def _step(kind: str, folder: Path) -> DenseLayer | str:
    if kind == "Normalize":
        return "normalize"
    if kind != "Dense":
        raise ModelError(
            f"{folder}: a {kind} after pooling is not supported; only Dense and Normalize are"
        )
    settings = _read_table(folder / "config.json")
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS or settings.get("use_residual"):
        raise ModelError(
            f"{folder}: a projection with activation {activation} or a residual is not supported; "
            f"known activations are {', '.join(ACTIVATIONS)}"
        )
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelError(f"{folder}: expected model.safetensors; other formats can run code")
    return DenseLayer(weights, activation)
