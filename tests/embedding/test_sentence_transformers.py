"""Vectors of sentence-transformers models against that library's own encode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.embedding import load_embedder
from ttt_adapt.embedding.resolution import find_offline_model
from ttt_adapt.embedding.transformer import TransformerEmbedder
from ttt_adapt.errors import CorpusError, SettingsError

ODD_TEXTS = [
    "", " \n ", "a", "[SEP] [MASK]", "é" * 3000, "漢字かな交じり文" * 200, "x" * 5000 + " b", "a b " * 2000,
]  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(find_offline_model()), device="cpu")


def encode(reference: Any, texts: list[str]) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = reference.encode(
        texts, normalize_embeddings=True, show_progress_bar=False
    )
    return vectors


def load(folder: Path, **changes: Any) -> TransformerEmbedder:
    settings = {"model": str(folder), "dtype": "float32", "device": "cpu", **changes}
    embedder = load_embedder(EmbeddingSettings.model_validate(settings))
    assert isinstance(embedder, TransformerEmbedder)
    return embedder


def test_equals_encode(minilm: TransformerEmbedder, reference: Any, passages: list[str]) -> None:
    texts = [*ODD_TEXTS, *passages[:16]]
    vectors = minilm.embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(texts), 384)
    np.testing.assert_allclose(vectors, encode(reference, texts), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)


def test_neighbours_in_a_batch_do_not_matter(
    minilm: TransformerEmbedder, passages: list[str]
) -> None:
    texts = ["short", *passages[:12], "long " * 300]
    alone = np.concatenate([minilm.embed([text]) for text in texts])
    np.testing.assert_allclose(minilm.embed(texts), alone, atol=1e-6)
    np.testing.assert_allclose(minilm.embed(texts[::-1])[::-1], alone, atol=1e-6)


def test_the_same_call_gives_the_same_bytes(
    minilm: TransformerEmbedder, passages: list[str]
) -> None:
    assert minilm.embed(passages[:8]).tobytes() == minilm.embed(passages[:8]).tobytes()


def test_bfloat16_finds_the_same_neighbours(
    minilm: TransformerEmbedder, passages: list[str]
) -> None:
    fast = load_embedder(EmbeddingSettings(dtype="bfloat16", device="cpu"))
    exact_ND, fast_ND = minilm.embed(passages), fast.embed(passages)
    np.testing.assert_allclose(np.linalg.norm(fast_ND, axis=1), 1.0, atol=1e-6)
    assert (exact_ND * fast_ND).sum(axis=1).min() > 0.9995
    shared = [len(set(a) & set(b)) for a, b in zip(top(exact_ND), top(fast_ND), strict=True)]
    assert np.mean(shared) >= 9.8
    assert fast.fingerprint != minilm.fingerprint
    assert fast.description == "all-MiniLM-L6-v2, bfloat16"


def top(vectors_ND: NDArray[np.float32], count: int = 10) -> list[list[int]]:
    scores = vectors_ND @ vectors_ND.T
    np.fill_diagonal(scores, -2.0)
    found: list[list[int]] = np.argsort(-scores, axis=1)[:, :count].tolist()
    return found


def test_progress_counts_every_text(minilm: TransformerEmbedder) -> None:
    counts: list[int] = []
    minilm.embed(["a", "b"] * 35, progress=counts.append)
    assert sum(counts) == 70
    assert max(counts) <= 32
    assert minilm.embed([], progress=counts.append).shape == (0, 384)


def test_whitespace_is_an_empty_text(minilm: TransformerEmbedder) -> None:
    vectors = minilm.embed(["", "  \n\t"])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-7)


def test_texts_without_a_vector_are_refused(minilm: TransformerEmbedder) -> None:
    with pytest.raises(CorpusError, match=r"text 1: lone surrogate U\+DC00 at character 0"):
        minilm.embed(["fine", "\udc00"])
    with pytest.raises(CorpusError, match=r"expected a sequence of texts, found one string"):
        minilm.embed("one string")
    with pytest.raises(CorpusError, match="text 0: expected a string, found bytes"):
        minilm.embed([b"bytes"])  # type: ignore[list-item]


def test_fingerprint_of_settings(minilm: TransformerEmbedder) -> None:
    shorter = load_embedder(EmbeddingSettings(dtype="float32", device="cpu", max_tokens=64))
    again = load_embedder(
        EmbeddingSettings(
            model="sentence-transformers/all-MiniLM-L6-v2", dtype="float32", device="cpu"
        )
    )
    assert shorter.fingerprint != minilm.fingerprint
    assert again.fingerprint == minilm.fingerprint
    assert again.description == minilm.description == "all-MiniLM-L6-v2, float32"


def test_max_tokens_beyond_the_positions_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_tokens 513 exceeds the 512 positions"):
        load_embedder(EmbeddingSettings(max_tokens=513))


@pytest.fixture
def save_sentence_model(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Save a tiny BERT with the modules given; its folder and sentence-transformers' own object."""

    def save(*, poolings: tuple[str, ...], dense: bool, **options: Any) -> tuple[Path, Any]:
        import torch
        import transformers
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import (
            Dense,
            Normalize,
            Pooling,
            Transformer,
        )

        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=30522, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        transformers.BertModel(config).save_pretrained(tmp_path / "bert")
        transformers.AutoTokenizer.from_pretrained(find_offline_model()).save_pretrained(
            tmp_path / "bert"
        )
        modules = [
            Transformer(str(tmp_path / "bert"), max_seq_length=24),
            Pooling(32, pooling_mode=poolings),
        ]
        if dense:
            modules += [Dense(32 * len(poolings), 20), Normalize()]
        model = SentenceTransformer(modules=modules, device="cpu", **options)
        model.save_pretrained(str(tmp_path / "sentence"))
        return tmp_path / "sentence", model

    return save


@pytest.mark.parametrize(
    ("poolings", "dense"),
    [
        (("cls",), False),
        (("max",), True),
        (("mean", "lasttoken"), True),
        (("weightedmean",), False),
        (("mean_sqrt_len_tokens", "max"), False),
    ],
)
def test_other_modules_equal_encode(
    save_sentence_model: Callable[..., tuple[Path, Any]],
    passages: list[str],
    poolings: tuple[str, ...],
    dense: bool,
) -> None:
    folder, model = save_sentence_model(poolings=poolings, dense=dense)
    texts = [*ODD_TEXTS, *passages[:10]]
    embedder = load(folder)
    np.testing.assert_allclose(embedder.embed(texts), encode(model, texts), atol=1e-6)
    assert embedder.dimension == (20 if dense else 32 * len(poolings))
    assert embedder.description == "sentence, float32"


def test_a_default_prompt_is_put_before_texts(
    save_sentence_model: Callable[..., tuple[Path, Any]], passages: list[str]
) -> None:
    folder, model = save_sentence_model(
        poolings=("mean",), dense=False, prompts={"ask": "query: "}, default_prompt_name="ask"
    )
    vectors = load(folder).embed(passages[:5])
    np.testing.assert_allclose(vectors, encode(model, passages[:5]), atol=1e-6)
    plain = model.encode(passages[:5], prompt="", normalize_embeddings=True)
    assert np.abs(vectors - plain).max() > 1e-3
