"""Predictions as JSON and back: every digit, every text, strict JSON."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.serialization import (
    dumps,
    from_json,
    loads,
    read_results,
    to_json,
    write_results,
)
from ttt_adapt.types import Learned, Prediction, Score, Source

any_text = st.text(st.characters(), max_size=10)  # lone surrogates included
numbers = st.floats(allow_nan=False)
predictions = st.builds(
    Prediction,
    query_id=any_text,
    subset=any_text,
    steps=st.lists(st.integers(0, 50)).map(tuple),
    scores=st.lists(st.builds(Score, numbers, st.integers(0), st.integers(0))).map(tuple),
    num_steps=st.integers(0, 50),
    learned=st.none()
    | st.builds(Learned, st.lists(numbers).map(tuple), st.integers(0), any_text, numbers),
    sources=st.lists(
        st.builds(Source, any_text, any_text, any_text, numbers, numbers, numbers, any_text),
        max_size=3,
    ).map(tuple),
    num_excluded_own=st.integers(0),
    num_excluded_overlap=st.integers(0),
    seconds=st.dictionaries(any_text, numbers),
    failure=any_text,
)


def refuse(constant: str) -> Any:
    raise AssertionError(f"not strict JSON: {constant}")


@settings(deadline=None)
@given(predictions)
def test_round_trip_is_exact(prediction: Prediction) -> None:
    line = dumps(prediction)
    assert "\n" not in line
    assert line.isascii()
    json.loads(line, parse_constant=refuse)
    assert loads(Prediction, line) == prediction


def sample(**changes: Any) -> Prediction:
    score = Score(12.5, 10, 4)
    learned = Learned((1.5, 0.25), 7, "", 0.5)
    source = Source("d#0", "a.py", "code", 0.9, 0.1, 0.3, "text")
    whole = Prediction("q", "code", (0, 1), (score, score), 1, learned, (source,))
    return dataclasses.replace(whole, **changes)


def test_numbers_json_has_no_name_for() -> None:
    losses = (math.inf, -math.inf, math.nan, -0.0, 1e-320)
    line = dumps(sample(learned=Learned(losses, 1, "nan", math.nan)))
    json.loads(line, parse_constant=refuse)
    learned = loads(Prediction, line).learned
    assert learned is not None
    assert str(learned.losses_nats) == str(losses)
    assert math.isnan(learned.elapsed_s)


def test_numpy_numbers_become_plain_ones() -> None:
    odd = sample(scores=(Score(np.float64(0.1), np.int64(3), 1), Score(np.float64("nan"), 1, 1)))  # type: ignore[arg-type]
    again = loads(Prediction, dumps(odd))
    assert again.scores[0] == Score(0.1, 3, 1)
    assert type(again.scores[0].num_bytes) is int
    with pytest.raises(TypeError, match="expected a value with a JSON form, found object"):
        to_json(object())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, r"row\.scores: expected an array, found None"),
        ({"scores": [{"nats": "x", "num_bytes": 1, "num_tokens": 1}]}, r"row\.scores\[0\]\.nats: "),
        ({"scores": [{"nats": 1.0}]}, r"row\.scores\[0\]: a Score lacks num_bytes, num_tokens"),
        ({"num_steps": 1.5}, r"row\.num_steps: expected an integer, found 1\.5"),
        ({"num_steps": True}, r"row\.num_steps: expected an integer, found True"),
        ({"query_id": 3}, r"row\.query_id: expected text, found 3"),
        ({"seconds": []}, r"row\.seconds: expected an object"),
        ({"learned": "no"}, r"row\.learned: expected an object \(Learned\), found 'no'"),
        ({"extra": 1}, r"row: a Prediction has unknown extra; was it written by another version"),
    ],
)
def test_other_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(Prediction, {**to_json(sample()), **change}, where="row")


def test_results_files(tmp_path: Path) -> None:
    path = tmp_path / "run" / "results.jsonl"
    rows = [sample(query_id=name) for name in ("b", "a", "東京")]
    assert write_results(path, rows) == 3
    assert read_results(path) == rows
    assert len(path.read_bytes().splitlines()) == 3


def test_damaged_results_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with pytest.raises(UserError, match="no such results file; run the evaluation first"):
        read_results(path)
    path.write_text(dumps(sample()) + "\n" + dumps(sample())[:40])
    with pytest.raises(UserError, match=r"results\.jsonl:2: not valid JSON"):
        read_results(path)
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"results\.jsonl:1: not valid JSON"):
        read_results(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="not UTF-8, so not a results file"):
        read_results(path)


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write_results(path, [sample()])
    with pytest.raises(TypeError):
        write_results(path, [sample(), object()])  # type: ignore[list-item]
    assert read_results(path) == [sample()]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.jsonl"]
