"""Models loaded once, and real text: the source of the interpreter's own library."""

import argparse
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.embedding import load_embedder
from ttt_adapt.embedding.transformer import TransformerEmbedder
from ttt_adapt.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def passages() -> list[str]:
    """Eighty distinct passages of code and comments, 100 to 400 characters each."""
    found = []
    for module in (argparse, dataclasses, json.decoder, textwrap, inspect):
        source = inspect.getsource(module)
        starts = range(0, min(len(source), 12_000), 330)
        found += [source[start : start + 100 + start % 300] for start in starts]
    return list(dict.fromkeys(text for text in found if text.strip()))[:80]


@pytest.fixture(scope="session")
def minilm() -> TransformerEmbedder:
    """The default model in float32."""
    embedder = load_embedder(EmbeddingSettings(dtype="float32", device="cpu"))
    assert isinstance(embedder, TransformerEmbedder)
    return embedder


@pytest.fixture
def save_tiny(tmp_path: Path) -> Callable[[str], Path]:
    """Save a tiny causal language model of an architecture; its folder."""

    def save(architecture: str) -> Path:
        folder = tmp_path / architecture
        tiny_model(3, architecture=architecture).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return save
