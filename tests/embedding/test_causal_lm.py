"""Hidden states of causal language models against one text at a time, without padding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoModelForCausalLM

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.embedding import load_embedder
from ttt_adapt.errors import ModelError
from ttt_adapt.testing import sample_text, tiny_tokenizer
from ttt_adapt.types import Embedder

Save = Callable[[str], Path]
TEXTS = ["a", "", "two words", sample_text(1, 5), sample_text(2, 60), "é漢字 \n", sample_text(3, 9)]


def load(folder: Path, **changes: Any) -> Embedder:
    settings = {"kind": "causal-lm", "model": str(folder), "dtype": "float32", "device": "cpu"}
    return load_embedder(EmbeddingSettings.model_validate({**settings, **changes}))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_equals_one_text_at_a_time(save_tiny: Save, architecture: str, pooling: str) -> None:
    folder = save_tiny(architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tiny_tokenizer()
    rows = []
    for text in TEXTS:
        ids = tokenizer(text).input_ids[:128] or [tokenizer.bos_token_id]
        with torch.inference_mode():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        hidden_TH = output.hidden_states[-1][0].double().numpy()
        vector = hidden_TH.mean(axis=0) if pooling == "mean" else hidden_TH[-1]
        rows.append(vector / np.linalg.norm(vector))
    embedder = load(folder, pooling=pooling)
    np.testing.assert_allclose(embedder.embed(TEXTS), np.stack(rows), atol=1e-6)
    assert embedder.dimension == 32
    assert embedder.description == f"{architecture}, {pooling} of hidden states, float32"


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_batches_do_not_matter(save_tiny: Save, architecture: str, batch_size: int) -> None:
    folder = save_tiny(architecture)
    embedder = load(folder)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    together = load(folder, batch_size=batch_size).embed(TEXTS)
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_the_tokenizers_own_first_token_is_read(save_tiny: Save) -> None:
    folder = save_tiny("llama")
    plain = load(folder, pooling="last").embed(["text"])
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save_pretrained(folder)
    with_first = load(folder, pooling="last").embed(["text", ""])
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    for text, vector in zip(["text", ""], with_first, strict=True):
        ids = [0, *tiny_tokenizer()(text).input_ids]
        with torch.inference_mode():
            state = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(vector, state / state.norm(), atol=1e-6)
    assert np.abs(plain[0] - with_first[0]).max() > 1e-3


def test_long_texts_are_represented_by_their_beginning(save_tiny: Save) -> None:
    embedder = load(save_tiny("gpt2"), max_tokens=16)
    vectors = embedder.embed(["x" * 16, "x" * 16 + " and more" * 5000])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


def test_fingerprint_covers_what_vectors_depend_on(save_tiny: Save, tmp_path: Path) -> None:
    folder = save_tiny("llama")
    first = load(folder).fingerprint
    assert load(folder).fingerprint == first
    assert load(folder, batch_size=4).fingerprint == first
    others = {load(folder, pooling="last").fingerprint, load(folder, max_tokens=9).fingerprint}
    others.add(load(folder, dtype="bfloat16").fingerprint)
    (folder / "tokenizer_config.json").write_text(
        (folder / "tokenizer_config.json").read_text() + "\n"
    )
    others.add(load(folder).fingerprint)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    others.add(load(folder).fingerprint)
    assert len(others | {first}) == 6


def test_a_non_finite_vector_is_an_error(save_tiny: Save) -> None:
    folder = save_tiny("llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][2 + ord("z") - 33] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    embedder = load(folder)
    assert np.isfinite(embedder.embed(["abc"])).all()
    with pytest.raises(ModelError, match="text 1: the model gave a non-finite vector"):
        embedder.embed(["abc", "xyz"])


def test_missing_weights_are_not_made_up(save_tiny: Save) -> None:
    folder = save_tiny("llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing \(layers.1.mlp.up_proj.weight"):
        load(folder)


def test_a_truncated_weight_file_is_refused(save_tiny: Save) -> None:
    folder = save_tiny("gpt2")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"gpt2: cannot be loaded: .*"):
        load(folder)


def test_unusable_devices_are_refused(save_tiny: Save) -> None:
    with pytest.raises(ModelError, match="unknown device 'abacus'; use auto, cpu or cuda"):
        load(save_tiny("gpt2"), device="abacus")
