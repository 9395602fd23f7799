"""Related passages: an order that loses nothing, keeps families together, and what it does to a run."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.config import ChunkSettings, ModelSettings, SourceSettings
from ttt_adapt.corpus import chunk_documents
from ttt_adapt.errors import CorpusError
from ttt_adapt.models import load_language_model
from ttt_adapt.testing import silent, tiny_pretraining
from ttt_adapt.training import plan_pretraining, pretrain, related
from ttt_adapt.training.related import related_order, related_texts
from ttt_adapt.types import Document

THEMES = {
    "sea": "the captain saw the harbour and the sails while the tide ran under the keel",
    "code": "def parse(self, token): return self.tree[token] if token else None",
    "law": "the court shall hear the appeal where the statute so provides, subject to section nine",
}


def unit_vectors(num: int, width: int, seed: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).standard_normal((num, width))
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn.astype(np.float32)


def reference(
    vectors_ND: NDArray[np.float32], owners_N: NDArray[np.int64], begin: int
) -> list[int]:
    """Every similarity looked at, one passage after the other."""
    cosines_NN = vectors_ND.astype(np.float64) @ vectors_ND.T.astype(np.float64)
    order = [begin]
    while len(order) < len(vectors_ND):
        left = [n for n in range(len(vectors_ND)) if n not in order]
        others = [n for n in left if owners_N[n] != owners_N[order[-1]]]
        order.append(max(others or left, key=lambda n: float(cosines_NN[order[-1], n])))
    return order


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 40), st.integers(0, 10**6))
def test_order_is_the_obvious_one(num: int, num_owners: int, near: int, seed: int) -> None:
    vectors_ND = unit_vectors(num, 16, seed)
    owners_N = np.random.default_rng(seed + 1).integers(0, num_owners, num)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(related, "NUM_NEIGHBORS", near)
        order_N = related_order(vectors_ND, owners_N, seed)
    begin = int(np.random.default_rng(seed).integers(num))
    assert order_N.tolist() == reference(vectors_ND, owners_N, begin)


def corpus(num_of_each: int = 12) -> list[Document]:
    """Documents of several passages each, the themes taking turns."""
    return [
        Document(f"{theme}-{number}", "\n".join(f"{line} {number} {k}" for k in range(30)))
        for number in range(num_of_each)
        for theme, line in THEMES.items()
    ]


def theme_of(text: str) -> str:
    return max(THEMES, key=lambda theme: text.count(THEMES[theme][:12]))


def test_a_theme_s_passages_follow_each_other() -> None:
    documents = corpus()
    found = related_texts(documents, 0)
    passages = [passage.text for passage in chunk_documents(documents, ChunkSettings())]
    assert sorted(found.texts) == sorted(passages)
    themes = [theme_of(text) for text in found.texts]
    changes = sum(a != b for a, b in itertools.pairwise(themes))
    assert len(THEMES) - 1 <= changes < len(themes) / 8
    assert 0.5 < found.mean_cosine <= 1
    assert related_texts(documents, 0) == found != related_texts(documents, 1)
    assert related_texts([], 0).texts == ()


def test_a_run_with_related_passages(tmp_path: Path) -> None:
    for part in range(2):
        lines = [json.dumps({"text": d.text}) for d in corpus()[part::2]]
        (tmp_path / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = SourceSettings(path="part-*.jsonl", related=True)
    run = tiny_pretraining(
        sources=(source, SourceSettings(path="part-0.jsonl")),
        validation=(SourceSettings(path="part-1.jsonl"),),
    )
    assert plan_pretraining(run, tmp_path)["num_steps"] == 12
    result = pretrain(run, tmp_path / "m", data_root=tmp_path, report=silent)
    described = json.loads((tmp_path / "m" / "tokens" / "mixture.json").read_text())["train"]
    assert described[0]["num_documents"] == 36
    assert described[0]["num_related_passages"] > 36
    assert 0.5 < described[0]["mean_cosine_along"] <= 1
    assert "num_related_passages" not in described[1]
    card = (tmp_path / "m" / "README.md").read_text()
    assert "passages, each after one it resembles | 100% | 36 |" in card
    assert result.finished
    lm = load_language_model(ModelSettings(name=str(tmp_path / "m"), device="cpu"))
    # The stream of tokens is both sources', the related one in a stretch, themes side by side.
    tokens = np.fromfile(tmp_path / "m" / "tokens" / "train.bin", dtype="<u2")
    texts = lm.tokenizer.decode(tokens.tolist()).split(lm.tokenizer.bos_token)[1:]
    assert len(texts) == described[0]["num_related_passages"] + described[1]["num_documents"]


def test_no_file_matches(tmp_path: Path) -> None:
    missing = tiny_pretraining(sources=(SourceSettings(path="none-*.jsonl", related=True),))
    with pytest.raises(CorpusError, match=r"none-\*\.jsonl: no file matches"):
        plan_pretraining(missing, tmp_path)
    with pytest.raises(CorpusError, match=r"none-\*\.jsonl: no file matches"):
        pretrain(missing, tmp_path / "m", data_root=tmp_path, report=silent)
