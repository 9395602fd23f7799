"""The numbers of a report: which queries are compared, with what, and by how much."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.report.correlation import rank_correlation
from ttt_adapt.evaluation.report.examples import choose_examples, mark_repeats
from ttt_adapt.evaluation.report.pairing import Pairing, pair_runs
from ttt_adapt.evaluation.report.runs import read_runs
from ttt_adapt.evaluation.summary import summarize
from ttt_adapt.types import Prediction, Score, Source

RunWriter = Callable[..., Path]
MakePredictions = Callable[..., list[Prediction]]
Fail = Callable[..., Prediction]


def pair(*folders: Path, num_resamples: int = 200) -> Pairing:
    return pair_runs(read_runs(folders), num_resamples=num_resamples)


def test_equals_the_run_s_own_summary(
    write_run: RunWriter, make_predictions: MakePredictions
) -> None:
    made = make_predictions("sift", num_queries=20, subsets=("ArXiv", "Github"))
    pairing = pair(write_run("sift", made=list(reversed(made))))
    summary = summarize(made, num_resamples=200)
    assert len(pairing.arms[0].points) == len(summary.steps) == 3
    for point, expected in zip(pairing.arms[0].points, summary.steps, strict=True):
        against = expected.against_base
        assert against is not None and point.ratio is not None
        assert point.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-12)
        assert (point.ratio.value, point.ratio.low, point.ratio.high) == (
            against.ratio,
            against.ratio_low,
            against.ratio_high,
        )
        assert (point.wins, point.losses) == (against.wins, against.losses)
    pile = summary.steps[-1].pile_all_against_base
    found = pairing.pile_all(pairing.arms[0])
    assert pile is not None and found is not None
    assert (found.value, found.low, found.high) == (pile.ratio, pile.ratio_low, pile.ratio_high)
    for subset, against in summary.steps[-1].against_base_by_subset.items():
        interval = pairing.ratio(pairing.arms[0], pairing.rows_of(subset))
        assert interval is not None
        assert (interval.value, interval.low) == (against.ratio, against.ratio_low)


def test_only_shared_queries_are_compared(
    write_run: RunWriter, make_predictions: MakePredictions, failed: Fail
) -> None:
    one = make_predictions("sift")
    two = make_predictions("nearest")[2:]
    one[3] = failed(one[3])
    two[5] = replace(two[5], scores=(two[5].scores[0], *[Score(math.nan, 0, 0)] * 2))
    pairing = pair(write_run("sift", made=one), write_run("nearest", made=two))
    assert (pairing.num_union, pairing.num_shared) == (12, 10)
    left = {"text-000", "text-001", "text-003", "text-007"}
    expected = [p.query_id for p in one if p.query_id not in left]
    assert list(pairing.query_ids) == expected
    assert [(arm.num_failed, arm.num_not_finite) for arm in pairing.arms] == [(1, 0), (0, 1)]
    kept = [p for p in one if p.query_id in expected]
    nats = sum(p.scores[-1].nats for p in kept)
    num_bytes = sum(p.scores[-1].num_bytes for p in kept)
    last = pairing.arms[0].last
    assert last is not None
    assert last.bits_per_byte == pytest.approx(nats / num_bytes / math.log(2), rel=1e-12)


def test_base_from_another_run_of_the_same_model(write_run: RunWriter) -> None:
    base = write_run("base", steps=(0,))
    later = write_run("sift", steps=(5,))
    other = write_run("foreign", steps=(5,), info={"model": {"name": "other"}})
    pairing = pair(base, later, other)
    arms = {arm.label: arm for arm in pairing.arms}
    assert arms["base"].is_base and arms["base"].steps == (0,)
    assert arms["sift"].last is not None and arms["sift"].last.ratio is not None
    assert arms["sift"].last.ratio.value == pytest.approx(0.92, abs=0.03)
    assert arms["foreign"].base_Q is None and arms["foreign"].reductions_Q is None
    assert [arm.label for arm in pairing.ranked] == ["sift"]
    assert any("different models (llama-7m, other)" in note for note in pairing.notes)
    assert any("No base scores (step 0) for foreign" in note for note in pairing.notes)


def test_notes_name_what_differs(write_run: RunWriter, make_predictions: MakePredictions) -> None:
    shifted = [
        replace(p, scores=tuple(Score(s.nats * 1.01, s.num_bytes, s.num_tokens) for s in p.scores))
        for p in make_predictions("nearest")
    ]
    one = write_run("sift")
    two = write_run("nearest", made=shifted, info={"index": {"content_hash": "x"}})
    notes = " ".join(pair(one, two).notes)
    assert "base model's own scores differ between sift and nearest" in notes
    assert "retrieved from different indexes" in notes
    assert pair(one).notes == ()


def test_refusals(write_run: RunWriter, make_predictions: MakePredictions, tmp_path: Path) -> None:
    one = write_run("sift")
    foreign = [replace(p, query_id=f"other-{p.query_id}") for p in make_predictions("nearest")]
    longer = make_predictions("nearest")
    longer[4] = replace(
        longer[4], scores=tuple(replace(s, num_bytes=s.num_bytes + 1) for s in longer[4].scores)
    )
    with pytest.raises(UserError, match=r"no query in common \(sift: 12, foreign: 12\)"):
        pair(one, write_run("foreign", made=foreign))
    with pytest.raises(UserError, match="'text-004' has .* scored different texts"):
        pair(one, write_run("longer", made=longer))
    with pytest.raises(UserError, match="given twice"):
        read_runs([one, one])
    with pytest.raises(UserError, match="at least one run folder"):
        read_runs([])
    with pytest.raises(UserError, match=r"no results\.jsonl in it"):
        read_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no query"),
        (b"{not json}\n", r"results\.jsonl:1: not valid JSON"),
        (b'\n{"query_id": "a"}\n', r"results\.jsonl:2: a Prediction lacks"),
        (b"\xff\xfe\n", r"results\.jsonl:1: not UTF-8"),
    ],
)
def test_damaged_results(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "results.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_runs([tmp_path])


def test_damaged_files_beside_results(
    write_run: RunWriter, make_predictions: MakePredictions
) -> None:
    folder = write_run("sift", settings="not = = toml")
    assert read_runs([folder])[0].settings == {}
    (folder / "run.json").write_text("[1]")
    with pytest.raises(UserError, match="expected a JSON object, found list"):
        read_runs([folder])
    (folder / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json: not valid JSON"):
        read_runs([folder])
    (folder / "run.json").unlink()
    (folder / "settings.toml").unlink()
    (run,) = read_runs([folder])
    assert (run.label, run.model, run.protocol, run.settings_text) == ("sift", "", "", "")
    twice = write_run("twice", made=make_predictions("sift") * 2)
    with pytest.raises(UserError, match=r"results\.jsonl:13: query 'text-000' is there twice"):
        read_runs([twice])
    short = [replace(p, scores=p.scores[:2]) for p in make_predictions("sift")]
    with pytest.raises(UserError, match="3 steps but 2 scores"):
        read_runs([write_run("short", made=short)])


def test_labels_are_told_apart(write_run: RunWriter, tmp_path: Path) -> None:
    folders = [write_run("sift", folder=name) for name in ("a", "b")]
    deep = tmp_path / "c" / "a"
    deep.parent.mkdir()
    write_run("sift", folder="c/a")
    labels = [run.label for run in read_runs([*folders, deep])]
    assert labels == ["sift (a)", "sift (b)", "sift (2)"]
    (folders[0] / "run.json").write_text(json.dumps({"model": "/models/tiny"}))
    (run,) = read_runs([folders[0]])
    assert (run.label, run.model) == ("a", "tiny")


def test_sigma_is_that_after_the_last_pick(
    write_run: RunWriter, make_predictions: MakePredictions
) -> None:
    (prediction,) = made = make_predictions("sift", num_queries=1)
    (run,) = read_runs([write_run("sift", made=made)])
    smallest = min(source.posterior_var for source in prediction.sources)
    assert run.results["text-000"].sigma == math.sqrt(smallest)
    assert run.sources("text-000") == prediction.sources
    (base,) = read_runs([write_run("base", num_queries=1)])
    assert math.isnan(base.results["text-000"].sigma)


def test_examples_are_extremes_and_median(write_run: RunWriter) -> None:
    pairing = pair(write_run("base"), write_run("random"), write_run("sift", num_queries=11))
    best = pairing.ranked[0]
    assert best.label == "sift"
    reductions = best.reductions_Q
    assert reductions is not None
    order = np.argsort(-reductions, kind="stable")
    examples = choose_examples(pairing)
    assert [example.query_id for example in examples] == [
        pairing.query_ids[order[place]] for place in (0, 5, 10)
    ]
    assert [entry.arm.label for entry in examples[0].arms] == ["random", "sift"]
    assert examples[0].arms[1].reduction == reductions[order[0]]


def test_repeated_passages_are_marked() -> None:
    def source(text: str) -> Source:
        return Source("p", "s", "", 0.5, 0.1, 0.5, text)

    words = [f"word{n}" for n in range(60)]
    near = " ".join([*words[:-1], "other"])
    chinese = "先检索再学习然后预测每个查询都更新自己的参数" * 2
    texts = [" ".join(words), "new", "\n".join(words), near, chinese, chinese[1:], "", "new "]
    marked = mark_repeats([source(text) for text in texts])
    assert [entry.repeats for entry in marked] == [None, None, 0, 0, None, 4, None, 1]
    assert [entry.exact for entry in marked if entry.repeats is not None] == [
        True,
        False,
        False,
        True,
    ]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30),
)
def test_rank_correlation_against_counting(pairs: list[tuple[int, int]]) -> None:
    def ranks(values: list[int]) -> list[float]:
        return [
            sum(other < value for other in values) + (values.count(value) + 1) / 2
            for value in values
        ]

    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = rank_correlation(np.array(first, float), np.array(second, float))
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(np.corrcoef(ranks(first), ranks(second))[0, 1], abs=1e-12)


def test_rank_correlation_needs_three() -> None:
    assert math.isnan(rank_correlation(np.array([1.0, 2.0]), np.array([1.0, 2.0])))
