"""What a transformer's vectors depend on, in one hash."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ttt_adapt.storage import sha256_file, stable_hash

CODE_VERSION = "transformer-1"
"""Changes whenever the same files and settings would give other vectors."""

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "*.model",
)  # fmt: skip

_IRRELEVANT_KEYS = {"transformers_version", "torch_dtype", "dtype"}


def model_fingerprint(
    folder: Path, weights: Iterable[str], heads: Iterable[Path], **settings: Any
) -> str:
    """SHA-256 over weights, tokenizer, architecture and the settings given.

    Args:
        folder: of the transformer.
        weights: names of its weight files.
        heads: weight files of projections after pooling.
        settings: JSON values, such as pooling, token limit, dtype and kind.

    Two copies of a model agree where their files do, wherever they lie.
    """
    tokenizer = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    return stable_hash(
        {
            "code": CODE_VERSION,
            "weights": {name: sha256_file(folder / name) for name in weights},
            "heads": [sha256_file(path) for path in heads],
            "tokenizer": {path.name: sha256_file(path) for path in tokenizer},
            "python": {path.name: sha256_file(path) for path in sorted(folder.glob("*.py"))},
            "architecture": _architecture(folder / "config.json"),
            **settings,
        }
    )


def _architecture(path: Path) -> dict[str, Any]:
    """The model's configuration without what only says who wrote the file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return {
        key: value
        for key, value in values.items()
        if not key.startswith("_") and key not in _IRRELEVANT_KEYS
    }
