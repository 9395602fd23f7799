"""Summaries: ratios of sums, failures kept in sight, cost; and runs compared on shared queries."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.bootstrap import paired_bootstrap
from ttt_adapt.evaluation.comparison import compare
from ttt_adapt.evaluation.summary import Summary, read_summary, summarize
from ttt_adapt.types import Learned, Prediction, Score

LN2 = math.log(2)


def prediction(
    query_id: str, bits: tuple[float, ...], num_bytes: int = 10, **changes: Any
) -> Prediction:
    """Bits per byte at steps 0, 1, 5, …"""
    steps = (0, 1, 5, 10)[: len(bits)]
    scores = tuple(Score(value * LN2 * num_bytes, num_bytes, num_bytes) for value in bits)
    learned = Learned((1.0,), 100, "", 0.5)
    whole = Prediction(
        query_id, "a", steps, scores, 5, learned, (), 1, 2, {"train": 2.0, "score": 1.0}
    )
    return dataclasses.replace(whole, **changes)


RUN = [
    prediction("q1", (2.0, 1.5, 1.0), 10),
    prediction("q2", (4.0, 4.0, 5.0), 30, subset="b"),
    prediction("q3", (3.0, 2.0, 1.0), 20, num_steps=1),
]
FAILED = prediction("q4", (), failure="no candidates", learned=None, seconds={"retrieve": 4.0})


def test_corpus_level_ratios_overall_and_by_subset() -> None:
    summary = summarize(RUN)
    first, _, last = summary.steps
    assert [step.step for step in summary.steps] == [0, 1, 5]
    assert first.bits_per_byte == pytest.approx((20 + 120 + 60) / 60)  # not the mean, 3.0
    assert last.bits_per_byte == pytest.approx((10 + 150 + 20) / 60)
    assert last.bits_per_byte_by_subset == pytest.approx({"a": 30 / 30, "b": 5.0})
    assert last.by_subset["a"].num_bytes == 30
    assert last.score.num_tokens == 60
    assert last.pile_all is None
    assert [step.num_exhausted for step in summary.steps] == [0, 0, 1]


def test_against_the_base_is_the_paired_bootstrap_by_subset() -> None:
    summary = summarize(RUN, num_resamples=100, seed=3)
    last = summary.steps[-1]
    assert last.against_base == paired_bootstrap(
        [row.scores[0] for row in RUN],
        [row.scores[2] for row in RUN],
        subsets=["a", "b", "a"],
        num_resamples=100,
        seed=3,
    )
    assert (last.against_base.wins, last.against_base.losses) == (2, 1)
    assert set(last.against_base_by_subset) == {"a", "b"}
    assert last.against_base_by_subset["b"].ratio == pytest.approx(5 / 4)
    base = summary.steps[0].against_base
    assert base is not None
    assert (base.difference, base.low, base.high, base.ties) == (0.0, 0.0, 0.0, 3)


def test_the_order_of_predictions_does_not_matter() -> None:
    rows = [prediction(f"q{i}", (3.0, 2.0 + i % 3), 10 + i) for i in range(30)]
    expected = summarize(rows, num_resamples=50)
    random.Random(0).shuffle(rows)
    assert summarize(rows, num_resamples=50) == expected


def test_failures_are_counted_listed_and_fall_back_to_the_base() -> None:
    alone = summarize([*RUN, FAILED])
    assert (alone.num_queries, alone.num_successful) == (4, 3)
    (failure,) = alone.failures
    assert (failure.query_id, failure.subset, failure.reason) == ("q4", "a", "no candidates")
    steps = [dataclasses.replace(step, with_failures=math.nan) for step in summarize(RUN).steps]
    assert repr(list(alone.steps)) == repr(steps)  # NaN differs from itself
    assert alone.num_failed_without_base == 1
    assert all(math.isnan(step.with_failures) for step in alone.steps)

    base_run = [prediction(f"q{i}", (bits,), size) for i, bits, size in [(4, 6.0, 40)]]
    kept = summarize([*RUN, FAILED], base=base_run)
    assert kept.num_failed_without_base == 0
    assert kept.steps[2].bits_per_byte == pytest.approx(180 / 60)
    assert kept.steps[2].with_failures == pytest.approx((180 + 240) / 100)
    # A failed query that got as far as step 0 brings its own base score.
    partly = dataclasses.replace(FAILED, steps=(0, 1, 5), scores=base_run[0].scores)
    assert summarize([*RUN, partly]).steps[2].with_failures == pytest.approx(4.2)
    assert summarize(RUN).steps[2].with_failures == summarize(RUN).steps[2].bits_per_byte


def test_scores_that_are_not_finite_are_failures() -> None:
    broken = prediction("q9", (2.0, math.nan, math.inf))
    summary = summarize([*RUN, broken])
    (failure,) = summary.failures
    assert failure.reason == "the score at step 1 is not finite"
    assert summary.steps[0].score.num_bytes == 60  # the same queries at every step
    assert summary.steps[0].with_failures == pytest.approx((200 + 20) / 70)


def test_when_everything_failed_there_is_still_a_summary(tmp_path: Path) -> None:
    summary = summarize([FAILED])
    assert summary.steps == ()
    assert (summary.num_queries, summary.num_successful) == (1, 0)
    summary.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == summary


def test_stopped_learning_is_listed_and_counts() -> None:
    stopped = dataclasses.replace(RUN[0], learned=Learned((1.0, 9.0), 50, "exploded", 0.1))
    nan = prediction("q5", (2.0, 2.0, 2.0), learned=Learned((), 0, "nan", 0.1))
    summary = summarize([stopped, nan, RUN[1]])
    assert summary.stopped == {"exploded": ("q1",), "nan": ("q5",)}
    assert summary.num_successful == 3


def test_cost_counts_failed_queries_too() -> None:
    cost = summarize([*RUN, FAILED]).cost
    assert cost.seconds == {"retrieve": 4.0, "score": 3.0, "train": 6.0}
    assert cost.seconds_per_query == {"retrieve": 1.0, "score": 0.75, "train": 1.5}
    assert cost.tokens_trained == 300
    assert cost.tokens_scored == 3 * 60
    assert (cost.num_excluded_own, cost.num_excluded_overlap) == (4, 8)


def test_pile_all_where_every_subset_is_the_piles() -> None:
    run = [
        prediction("q1", (2.0, 1.0), subset="Github"),
        prediction("q2", (3.0, 2.0), subset="pile_arxiv"),
        prediction("q3", (5.0, 4.0), 100, subset="pile_arxiv"),
    ]
    last = summarize(run).steps[-1]
    assert last.pile_all is not None
    arxiv = (20 + 400) / 110
    assert last.pile_all.bits_per_byte == pytest.approx((7.59 + 8.96 * arxiv) / 16.55)
    assert last.pile_all.weights_covered == pytest.approx(16.55)
    assert last.pile_all_against_base is not None
    assert last.pile_all_against_base.other == pytest.approx(last.pile_all.bits_per_byte)
    assert last.pile_all_against_base.difference == pytest.approx(-1.0)
    mixed = summarize([*run, prediction("q4", (1.0, 1.0), subset="Novels")]).steps[-1]
    assert (mixed.pile_all, mixed.pile_all_against_base) == (None, None)


def test_without_step_zero_the_base_comes_from_elsewhere() -> None:
    late = [dataclasses.replace(row, steps=row.steps[1:], scores=row.scores[1:]) for row in RUN]
    assert summarize(late).steps[0].against_base is None
    assert summarize(late, base=RUN).steps[-1].against_base == summarize(RUN).steps[-1].against_base


def test_empty_texts_have_no_say(tmp_path: Path) -> None:
    empty = prediction("q0", (0.0, 0.0, 0.0), 0, subset="empty")
    summary = summarize([*RUN, empty])
    assert summary.steps[-1].bits_per_byte == summarize(RUN).steps[-1].bits_per_byte
    assert math.isnan(summary.steps[-1].bits_per_byte_by_subset["empty"])
    assert summarize([empty]).steps[-1].against_base is None


def test_round_trip_as_strict_json(tmp_path: Path) -> None:
    summary = summarize([*RUN, FAILED], num_resamples=20)
    path = tmp_path / "summary.json"
    summary.write(path)
    text = path.read_text()
    assert "NaN" in text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    again = read_summary(path)
    assert isinstance(again, Summary)
    assert repr(again) == repr(summary)  # NaN differs from itself
    with pytest.raises(UserError, match="no such summary; run the evaluation first"):
        read_summary(tmp_path / "none.json")


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least one prediction"):
        summarize([])
    with pytest.raises(UserError, match="two predictions for the query 'q1'"):
        summarize([RUN[0], RUN[0]])
    with pytest.raises(UserError, match=r"'q5' was scored at steps \(0, 1\), 'q1' at"):
        summarize([*RUN, prediction("q5", (1.0, 1.0))])
    with pytest.raises(UserError, match="'q1': 3 steps but 1 scores"):
        summarize([dataclasses.replace(RUN[0], scores=RUN[0].scores[:1])])
    with pytest.raises(UserError, match="'q1' has 10 bytes in this run and 9 in the base's"):
        late = dataclasses.replace(RUN[0], steps=(1,), scores=RUN[0].scores[1:2])
        summarize([late], base=[prediction("q1", (2.0,), 9)])


def other_run() -> list[Prediction]:
    return [
        prediction("q1", (2.0, 1.0, 0.5), 10),
        prediction("q2", (4.0, 3.0, 2.0), 30, subset="b"),
        prediction("q3", (), failure="killed"),
        prediction("q7", (1.0, 1.0, 1.0)),
    ]


def test_runs_are_compared_on_shared_queries() -> None:
    found = compare({"nearest": [*RUN, FAILED], "sift": other_run()}, baseline="nearest")
    assert found.num_shared == 2  # q1 and q2
    assert found.num_queries == {"nearest": 4, "sift": 4}
    assert found.num_failed == {"nearest": 1, "sift": 1}
    assert [(row.run, row.step) for row in found.rows] == [
        ("nearest", 0), ("nearest", 1), ("nearest", 5), ("sift", 0), ("sift", 1), ("sift", 5),
    ]  # fmt: skip
    last = found.rows[-1]
    assert last.bits_per_byte == pytest.approx((5 + 60) / 40)
    assert last.baseline_step == 5
    assert last.against_baseline is not None and last.against_base is not None
    assert last.against_baseline.base == pytest.approx((10 + 150) / 40)
    assert last.against_baseline.wins == 2
    assert last.against_base.base == pytest.approx((20 + 120) / 40)
    assert found.rows[0].against_baseline is None and found.rows[0].baseline_step is None


def test_a_baseline_that_never_adapts_is_compared_at_its_only_step() -> None:
    base = [
        prediction(row.query_id, (row.scores[0].bits_per_byte,), row.scores[0].num_bytes)
        for row in RUN
    ]
    found = compare({"base": base, "sift": RUN}, baseline="base", num_resamples=50)
    rows = {(row.run, row.step): row for row in found.rows}
    assert rows["sift", 5].baseline_step == 0
    assert rows["sift", 5].against_baseline is not None
    assert rows["sift", 5].against_baseline.base == pytest.approx(200 / 60)
    backwards = compare({"base": base, "sift": RUN[:2]}, baseline="sift")
    assert backwards.rows[0].baseline_step == 0
    late = [dataclasses.replace(row, steps=row.steps[1:], scores=row.scores[1:]) for row in RUN]
    none = compare({"base": base, "late": late}, baseline="late")
    assert none.rows[0].against_baseline is None and none.rows[0].baseline_step is None
    assert none.rows[1].against_base is None


def test_comparison_refusals() -> None:
    with pytest.raises(UserError, match="no run is named 'x'; the runs are one, two"):
        compare({"one": RUN, "two": RUN}, baseline="x")
    with pytest.raises(UserError, match=r"no query succeeded in all runs .*one: 3, two: 0"):
        compare({"one": RUN, "two": [FAILED]}, baseline="one")
    with pytest.raises(UserError, match="'q1' has 10 bytes in 'one' and 11 in 'two'"):
        compare({"one": RUN, "two": [prediction("q1", (1.0,), 11)]}, baseline="one")
