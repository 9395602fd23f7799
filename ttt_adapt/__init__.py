"""Test-time training for language models.

Index a corpus, select what tells most about a query, learn from it for a few steps, predict, and
have the weights back. The names below load on first use: ``import ttt_adapt`` itself loads neither
torch nor FAISS.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttt_adapt.corpus import read_documents
    from ttt_adapt.embedding import load_embedder
    from ttt_adapt.evaluation import bits_per_byte
    from ttt_adapt.indexes import Index
    from ttt_adapt.models import load_language_model
    from ttt_adapt.pipeline import build_index, evaluate, predict, select
    from ttt_adapt.selection import nearest, sift

__version__ = "0.1.0"

_ROOM_OF = {
    "Index": "indexes",
    "bits_per_byte": "evaluation",
    "build_index": "pipeline",
    "evaluate": "pipeline",
    "load_embedder": "embedding",
    "load_language_model": "models",
    "nearest": "selection",
    "predict": "pipeline",
    "read_documents": "corpus",
    "select": "pipeline",
    "sift": "selection",
}

__all__ = [
    "Index",
    "__version__",
    "bits_per_byte",
    "build_index",
    "evaluate",
    "load_embedder",
    "load_language_model",
    "nearest",
    "predict",
    "read_documents",
    "select",
    "sift",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
