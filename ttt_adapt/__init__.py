"""Test-time training for language models.

Index a corpus, select what tells most about a query, learn from it for a few steps, predict, and
have the weights back. The names below load on first use: ``import ttt_adapt`` itself loads neither
torch nor FAISS.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.corpus import read_documents
    from ttt_adapt.embedding import load_embedder
    from ttt_adapt.evaluation import bits_per_byte
    from ttt_adapt.indexes import Index
    from ttt_adapt.models import load_language_model
    from ttt_adapt.pipeline import build_index, evaluate, predict, select
    from ttt_adapt.selection import nearest, sift

__version__ = "0.1.0"

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        ".corpus": ("read_documents",),
        ".embedding": ("load_embedder",),
        ".evaluation": ("bits_per_byte",),
        ".indexes": ("Index",),
        ".models": ("load_language_model",),
        ".pipeline": ("build_index", "evaluate", "predict", "select"),
        ".selection": ("nearest", "sift"),
    },
)
