"""A small real world that several rooms test against: a corpus, its index, a language model."""

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ttt_adapt.config import ExperimentSettings

# Triton reads this once, when anything first imports it: before any test, whichever comes first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A run in the background is started with Ctrl-C ignored, and so would be the processes it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A machine for the kernels' tests alone may lack what the library needs (hence the imports within).
if importlib.util.find_spec("pydantic") is None:
    collect_ignore = ["test_gpu.py"]


def write_documents(path: Path, first: int, last: int) -> Path:
    from ttt_adapt.testing import sample_text

    rows = [
        {
            "text": sample_text(number, 60),
            "meta": {"id": f"document-{number}", "pile_set_name": f"subset-{number % 2}"},
        }
        for number in range(first, last)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``corpus.jsonl``, ``test.jsonl``, ``index`` and ``model``."""
    from ttt_adapt import pipeline
    from ttt_adapt.config import ChunkSettings, EmbeddingSettings
    from ttt_adapt.testing import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("world")
    write_documents(folder / "corpus.jsonl", 0, 60)
    # Documents 56..59 are in the corpus too: their own passages must not be learned from.
    write_documents(folder / "test.jsonl", 56, 66)
    tiny_model(3, max_length=128).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    pipeline.build_index(
        folder / "corpus.jsonl",
        folder / "index",
        chunks=ChunkSettings(size=120),
        embedding=EmbeddingSettings(kind="hashing"),
    )
    return folder


@pytest.fixture
def settings(world: Path) -> "ExperimentSettings":
    from ttt_adapt.config import (
        AdaptationSettings,
        CorpusSettings,
        EvaluationSettings,
        ExperimentSettings,
        ModelSettings,
        RetrievalSettings,
        SelectionSettings,
    )

    return ExperimentSettings(
        model=ModelSettings(name=str(world / "model"), device="cpu"),
        data=CorpusSettings(path=str(world / "test.jsonl")),
        retrieval=RetrievalSettings(num_candidates=20),
        selection=SelectionSettings(num_select=4, noise_var=0.1),
        adaptation=AdaptationSettings(learning_rate=1e-2, precision="float32"),
        evaluation=EvaluationSettings(steps=(0, 1, 4), num_resamples=50),
    )
