"""Text to unit vectors, for indexing passages and for asking with a query.

Three kinds of embedder stand behind one protocol (:class:`ttt_adapt.types.Embedder`):
sentence-transformers models, the hidden states of a causal language model, and signed feature
hashing, which needs no weights. Importing this package loads neither torch nor transformers.
"""

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.types import Embedder

__all__ = ["load_embedder"]


def load_embedder(settings: EmbeddingSettings) -> Embedder:
    """Load what ``settings`` describes.

    ``kind="sentence-transformers"`` takes a directory, a name on the hub, or the default
    ``all-MiniLM-L6-v2``, which the ``offline`` extra also brings; ``kind="causal-lm"`` a directory
    or a hub id; ``kind="hashing"`` nothing. Weights load from safetensors only.

    Raises:
        ModelError: the model cannot be found, is damaged, or holds nothing that loads safely.
        MissingDependencyError: the default model is nowhere and its ``offline`` extra is missing.
        SettingsError: a setting that the model found cannot honour.
    """
    if settings.kind == "hashing":
        from ttt_adapt.embedding.hashing import HashingEmbedder

        return HashingEmbedder(settings.dimension, max_tokens=settings.max_tokens)
    from ttt_adapt.embedding.loading import load_causal_lm, load_sentence_transformer

    if settings.kind == "causal-lm":
        return load_causal_lm(settings)
    return load_sentence_transformer(settings)
