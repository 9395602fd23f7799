"""Run folders as an evaluation leaves them, with made-up numbers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttt_adapt.evaluation.serialization import write_results
from ttt_adapt.types import Learned, Prediction, Score, Source

RunWriter = Callable[..., Path]
STEPS = (0, 1, 5)
EFFECTS = {"base": 0.0, "random": 0.02, "nearest": -0.05, "sift": -0.08, "in-context": -0.03}


def predictions(
    arm: str,
    *,
    num_queries: int = 12,
    steps: Sequence[int] = STEPS,
    subsets: Sequence[str] = ("prose", "code", "law"),
    text: str = "a passage with enough words to be compared with others",
) -> list[Prediction]:
    """One arm's predictions: equal texts and base scores whatever the arm and its steps."""
    made = []
    for position in range(num_queries):
        generator = np.random.default_rng(position)
        num_bytes = int(generator.integers(200, 900))
        base = num_bytes * float(generator.uniform(0.5, 1.0))
        noise = float(np.random.default_rng([position, len(arm)]).normal(0.0, 0.02))
        effect = EFFECTS.get(arm, -0.01) + (0.0 if arm == "base" else noise)
        scores = tuple(
            Score(base * (1.0 + effect * min(step, 5) / 5.0), num_bytes, num_bytes // 3)
            for step in steps
        )
        variances = [float(v) for v in generator.uniform(0.1, 0.9, 0 if arm == "base" else 5)]
        sources = tuple(
            Source(
                passage_id=f"doc-{position}-{rank}#0",
                source=f"train.jsonl:{rank + 1}",
                subset="prose",
                score=0.9 - 0.1 * rank,
                gain=0.2 / (rank + 1),
                posterior_var=variance,
                text=text if rank in (1, 3) else f"{text} {position} {rank} " + "x y z " * rank,
            )
            for rank, variance in enumerate(variances)
        )
        learns = arm not in ("base", "in-context")
        made.append(
            Prediction(
                query_id=f"text-{position:03d}",
                subset=subsets[position % len(subsets)],
                steps=tuple(steps),
                scores=scores,
                num_steps=5 if learns else 0,
                learned=Learned((3.0, 2.5), 640, "", 1.5) if learns else None,
                sources=sources,
                seconds={"score": 0.4} | ({"retrieve": 0.01, "train": 1.5} if learns else {}),
            )
        )
    return made


def fail(prediction: Prediction, reason: str = "RuntimeError: broken") -> Prediction:
    """The same query, failed."""
    return replace(prediction, scores=(), num_steps=0, learned=None, failure=reason)


@pytest.fixture
def write_run(tmp_path: Path) -> RunWriter:
    """Write a run folder; keyword arguments go to :func:`predictions`."""

    def write(
        arm: str,
        *,
        folder: str | None = None,
        made: Sequence[Prediction] | None = None,
        info: Mapping[str, Any] | None = None,
        settings: str = '[data]\npath = "texts.jsonl"\n\n[evaluation]\nprotocol = "full"\n',
        **options: Any,
    ) -> Path:
        path = tmp_path / (folder or arm)
        path.mkdir()
        write_results(path / "results.jsonl", predictions(arm, **options) if made is None else made)
        run = {
            "name": arm,
            "model": {"name": "llama-7m", "fingerprint": "ab" * 32},
            "index": {"content_hash": "cd" * 32, "num_passages": 1234, "factory": "Flat"},
            "protocol": "full",
            "seed": 0,
            "versions": {"torch": "2.13.0", "python": "3.11.2"},
            "created": "2026-01-02T03:04:05+00:00",
        }
        (path / "run.json").write_text(json.dumps({**run, **(info or {})}), encoding="utf-8")
        (path / "settings.toml").write_text(settings, encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_predictions() -> Callable[..., list[Prediction]]:
    return predictions


@pytest.fixture
def failed() -> Callable[..., Prediction]:
    return fail
