"""Evaluation end to end: arms, resume, kills, workers, failures; real index, model and files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttt_adapt import pipeline
from ttt_adapt.config import ExperimentSettings, override
from ttt_adapt.errors import SettingsError
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import load_language_model


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def nats(folder: Path) -> dict[str, list[float]]:
    return {row["query_id"]: [score["nats"] for score in row["scores"]] for row in rows(folder)}


def test_arms_share_queries_and_the_base(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    arms = ["base", "random", "nearest", "sift", "sift@1", "in-context"]
    summaries = pipeline.evaluate(settings, world / "index", tmp_path, arms=arms)
    assert list(summaries) == arms
    found = {arm: nats(tmp_path / arm) for arm in arms}
    assert all(found[arm].keys() == found["base"].keys() for arm in arms)
    assert len(found["base"]) == 10
    for arm in arms:
        for query, values in found[arm].items():
            assert values[0] == pytest.approx(found["base"][query][0], rel=1e-6)
    # The base arm never changes, learning arms do, and what was learned lowers the loss here.
    assert all(len(set(values)) == 1 for values in found["base"].values())
    assert sum(v[-1] for v in found["sift"].values()) < sum(v[0] for v in found["sift"].values())
    assert found["sift"] != found["sift@1"]
    summary = json.loads((tmp_path / "sift" / "summary.json").read_text())
    assert summary
    assert "noise_var = 0.1" in (tmp_path / "sift" / "settings.toml").read_text()


def test_base_score_is_bits_per_byte(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    pipeline.evaluate(settings, world / "index", tmp_path, arms=["base"])
    lm = load_language_model(settings.model)
    items = pipeline.read_items(settings)
    direct = bits_per_byte(lm.model, lm.tokenizer, [item.parts.text for item in items])
    found = nats(tmp_path / "base")
    for item, score in zip(items, direct.per_text, strict=True):
        assert found[item.id][0] == pytest.approx(score.nats, rel=1e-5)


def test_own_document_is_left_out(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    pipeline.evaluate(settings, world / "index", tmp_path, arms=["nearest", "random"])
    for arm in ("nearest", "random"):
        for row in rows(tmp_path / arm):
            own = row["query_id"].split("@")[0]
            assert row["sources"]
            assert all(s["passage_id"].split("#")[0] != own for s in row["sources"])
    excluded = [
        r["num_excluded_own"] + r["num_excluded_overlap"] for r in rows(tmp_path / "nearest")
    ]
    assert sum(count > 0 for count in excluded) == 4


def test_second_run_does_only_what_is_missing(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    seen: list[str] = []

    def progress(done: int, total: int, arm: str) -> None:
        seen.append(arm)

    few = override(settings, {"evaluation.per_subset": 2})
    pipeline.evaluate(few, world / "index", tmp_path, arms=["nearest"], progress=progress)
    assert len(seen) == 4
    before = nats(tmp_path / "nearest")
    pipeline.evaluate(settings, world / "index", tmp_path, arms=["nearest"], progress=progress)
    assert len(seen) == 10
    after = nats(tmp_path / "nearest")
    assert len(after) == 10 and all(after[query] == before[query] for query in before)
    pipeline.evaluate(settings, world / "index", tmp_path, arms=["nearest"], progress=progress)
    assert len(seen) == 10
    other = override(settings, {"adaptation.learning_rate": 2e-2})
    pipeline.evaluate(other, world / "index", tmp_path, arms=["nearest"], progress=progress)
    assert len(seen) == 20


def test_workers_give_the_same_results(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    few = override(settings, {"evaluation.per_subset": 2})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, workers in (("here", 0), ("there", 2)):
            pipeline.evaluate(
                few, world / "index", tmp_path / name, arms=["sift", "nearest"], workers=workers
            )
    finally:
        torch.set_num_threads(threads)
    for arm in ("sift", "nearest"):
        assert nats(tmp_path / "here" / arm) == nats(tmp_path / "there" / arm)


KILLED = """
import sys
from pathlib import Path
from ttt_adapt import pipeline
from ttt_adapt.config import ExperimentSettings
import torch
torch.set_num_threads(1)
settings = ExperimentSettings.model_validate_json(Path(sys.argv[1]).read_text())
pipeline.evaluate(settings, Path(sys.argv[2]), Path(sys.argv[3]), arms=["sift"],
                  progress=lambda done, total, arm: print(done, flush=True))
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_killed_run_continues(
    world: Path, settings: ExperimentSettings, tmp_path: Path, kind: signal.Signals
) -> None:
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "settings.json")]
    command += [str(world / "index"), str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "1"
    os.kill(process.pid, kind)
    process.wait(timeout=60)
    process.stdout.close()
    assert process.returncode != 0
    done = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pipeline.evaluate(
            settings, world / "index", out, arms=["sift"], progress=lambda d, t, a: done.append(t)
        )
        pipeline.evaluate(settings, world / "index", tmp_path / "whole", arms=["sift"])
    finally:
        torch.set_num_threads(threads)
    assert 0 < len(done) < 10
    assert nats(out / "sift") == nats(tmp_path / "whole" / "sift")


def test_query_without_candidates_is_a_counted_failure(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    strict = override(settings, {"retrieval.max_overlap": 0.0, "retrieval.ngram_size": 1})
    summaries = pipeline.evaluate(strict, world / "index", tmp_path, arms=["nearest"])
    found = rows(tmp_path / "nearest")
    assert len(found) == 10
    assert all("no candidate is left" in row["failure"] for row in found)
    assert len(summaries["nearest"].failures) == 10
    assert "no candidate is left" in summaries["nearest"].failures[0].reason


def test_diverging_query_keeps_its_last_good_score(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    wild = override(settings, {"adaptation.learning_rate": 1e30, "evaluation.per_subset": 1})
    pipeline.evaluate(wild, world / "index", tmp_path, arms=["nearest"])
    for row in rows(tmp_path / "nearest"):
        assert row["learned"]["stopped"]
        assert np.isfinite([score["nats"] for score in row["scores"]]).all()


def test_split_scores_the_second_half_only(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    split = override(settings, {"evaluation.protocol": "split"})
    pipeline.evaluate(split, world / "index", tmp_path / "split", arms=["base"])
    pipeline.evaluate(settings, world / "index", tmp_path / "full", arms=["base"])
    full = {row["query_id"]: row["scores"][0] for row in rows(tmp_path / "full" / "base")}
    for row in rows(tmp_path / "split" / "base"):
        whole = full[row["query_id"]]["num_bytes"]
        assert abs(row["scores"][0]["num_bytes"] - whole / 2) <= 4


def test_leaking_protocol_needs_one_process(
    world: Path, settings: ExperimentSettings, tmp_path: Path
) -> None:
    leaking = override(settings, {"adaptation.protocol": "tttlm", "adaptation.optimizer": "adamw"})
    with pytest.raises(SettingsError, match="workers 0 or 1, found 2"):
        pipeline.evaluate(leaking, world / "index", tmp_path, arms=["nearest"], workers=2)


@pytest.mark.parametrize("name", ["sfit", "sift@much", "in-context-no"])
def test_unknown_arm_is_named(
    settings: ExperimentSettings, world: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(SettingsError, match="expected"):
        pipeline.evaluate(settings, world / "index", tmp_path, arms=[name])
    assert not list(tmp_path.iterdir())


def test_plan_counts_what_would_be_done(settings: ExperimentSettings) -> None:
    plan = pipeline.plan_evaluation(settings, ["base", "nearest", "sift"])
    assert plan["num_texts"] == 10
    assert plan["num_training_steps"] == 10 * 2 * 4
    assert plan["subsets"] == ["subset-0", "subset-1"]


def test_time_is_accounted_for(world: Path, settings: ExperimentSettings, tmp_path: Path) -> None:
    few = override(settings, {"evaluation.per_subset": 1})
    started = time.perf_counter()
    pipeline.evaluate(few, world / "index", tmp_path, arms=["sift"])
    elapsed = time.perf_counter() - started
    seconds = [row["seconds"] for row in rows(tmp_path / "sift")]
    assert all(set(s) == {"embed", "retrieve", "select", "train", "score"} for s in seconds)
    assert 0 < sum(sum(s.values()) for s in seconds) < elapsed
