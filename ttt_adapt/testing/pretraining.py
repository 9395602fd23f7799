"""Pretraining at the smallest size: a corpus, its settings, and no progress."""

import json
from pathlib import Path
from typing import Any

from ttt_adapt.config import PretrainSettings, SourceSettings
from ttt_adapt.testing.texts import sample_text


def silent(_: str) -> None:
    """Swallow progress."""


def write_training_corpus(folder: Path) -> Path:
    """``corpus.jsonl`` of forty documents in ``folder``."""
    path = folder / "corpus.jsonl"
    lines = [json.dumps({"text": sample_text(seed, 80)}) for seed in range(40)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_pretraining(**changes: Any) -> PretrainSettings:
    """A model of width 32 on that corpus: twelve steps of four rows of 32 tokens.

    Args:
        changes: settings in the place of these.
    """
    values: dict[str, Any] = {
        "name": "tiny",
        "sources": (SourceSettings(path="corpus.jsonl", fraction=0.8),),
        "validation": (SourceSettings(path="corpus.jsonl", fraction=0.2),),
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 2,
        "max_length": 32,
        "num_tokens": 32 * 4 * 12,
        "batch_size": 4,
        "micro_batch_size": 2,
        "validate_every": 4,
        "checkpoint_every": 4,
        "precision": "float32",
        **changes,
    }
    return PretrainSettings(**values)
