"""Reports of runs that are small, broken, or unlike each other."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.report import write_report
from ttt_adapt.types import Prediction, Score

RunWriter = Callable[..., Path]
MakePredictions = Callable[..., list[Prediction]]
Fail = Callable[..., Prediction]


def report(tmp_path: Path, *folders: Path) -> tuple[str, list[str]]:
    """The page's text, tags left out, and the names of the files."""
    written = write_report(folders, tmp_path / "out", num_resamples=50)
    source = written[0].read_text(encoding="utf-8")
    body = re.sub(r"<(style|svg).*?</\1>", " ", source, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", body).replace("&#x27;", "'")
    assert not re.search(r"\b(nan|inf|None)\b", text.partition("settings.toml")[0])
    return " ".join(text.split()), [path.name for path in written]


def test_one_query(write_run: RunWriter, tmp_path: Path) -> None:
    text, names = report(
        tmp_path, write_run("base", num_queries=1), write_run("sift", num_queries=1)
    )
    assert "One text says nothing about uncertainty." in text
    assert "1 text in 1 subset" in text
    assert len(names) == 5


def test_two_queries(write_run: RunWriter, tmp_path: Path) -> None:
    text, _ = report(tmp_path, write_run("sift", num_queries=2))
    assert "Largest gain of sift" in text and "Median" not in text


def test_base_alone(write_run: RunWriter, tmp_path: Path) -> None:
    text, names = report(tmp_path, write_run("base", steps=(0,)))
    assert "bits per byte without adaptation (12 texts); no run here adapts" in text
    assert names == ["report.html", "cost.png"]


def test_no_base_anywhere(write_run: RunWriter, tmp_path: Path) -> None:
    text, names = report(tmp_path, write_run("sift", steps=(1, 5)))
    assert "bits per byte with sift" in text and "No base scores (step 0) for sift" in text
    assert names == ["report.html", "bits-per-byte.png", "cost.png"]


def test_every_query_failed(
    write_run: RunWriter, make_predictions: MakePredictions, failed: Fail, tmp_path: Path
) -> None:
    broken = [replace(failed(p), seconds={}, sources=()) for p in make_predictions("sift")]
    folder = write_run("sift", made=broken)
    text, names = report(tmp_path, folder)
    assert "Nothing can be compared: no text was scored" in text
    assert "12 cases in all arms." in text and "RuntimeError: broken" in text
    assert names == ["report.html"]
    text, names = report(tmp_path, folder, write_run("nearest"))
    assert "Nothing was scored in sift; the others are compared." in text
    assert "With nearest, the model needs" in text
    assert "12 texts in 3 subsets" in text


def test_disjoint_failures_leave_nothing(
    write_run: RunWriter, make_predictions: MakePredictions, failed: Fail, tmp_path: Path
) -> None:
    one, two = make_predictions("sift"), make_predictions("nearest")
    one = [failed(p) if n < 6 else p for n, p in enumerate(one)]
    two = [failed(p) if n >= 6 else p for n, p in enumerate(two)]
    text, _ = report(tmp_path, write_run("sift", made=one), write_run("nearest", made=two))
    assert "Nothing can be compared" in text
    assert "12 more have no score in some run" in text


def test_scores_that_are_not_numbers(
    write_run: RunWriter, make_predictions: MakePredictions, tmp_path: Path
) -> None:
    made = make_predictions("sift")
    for place, value in ((1, math.nan), (2, math.inf)):
        scores = (*made[place].scores[:2], Score(value, made[place].scores[0].num_bytes, 9))
        made[place] = replace(made[place], scores=scores)
    text, _ = report(tmp_path, write_run("base"), write_run("sift", made=made))
    assert "10 texts in 3 subsets" in text
    assert "2 more have no score in some run and are left out" in text
    assert text.count("a score is not a finite number") == 2


def test_numbers_that_are_missing_elsewhere(
    write_run: RunWriter, make_predictions: MakePredictions, tmp_path: Path
) -> None:
    unknown = [
        replace(
            p,
            seconds={"train": math.nan},
            sources=tuple(
                replace(s, score=math.nan, gain=math.nan, posterior_var=math.nan, source="")
                for s in p.sources
            ),
        )
        for p in make_predictions("sift")
    ]
    text, names = report(tmp_path, write_run("sift", made=unknown))
    assert "The runs recorded no times." in text
    assert "No run here has both passages with a posterior variance" in text
    assert names == ["report.html", "bits-per-byte.png", "subsets.png"]


def test_arms_with_different_steps(write_run: RunWriter, tmp_path: Path) -> None:
    text, _ = report(
        tmp_path,
        write_run("base", steps=(0,)),
        write_run("sift", steps=(0, 1, 5, 20)),
        write_run("nearest", steps=(0, 2)),
        write_run("random", steps=(5,)),
    )
    for heading in ("0 steps", "1 step", "2 steps", "5 steps", "20 steps"):
        assert f" {heading} " in text


def test_early_stops_are_listed(
    write_run: RunWriter, make_predictions: MakePredictions, tmp_path: Path
) -> None:
    made = make_predictions("sift")
    learned = made[4].learned
    assert learned is not None
    made[4] = replace(made[4], num_steps=2, learned=replace(learned, stopped="exploded"))
    text, _ = report(tmp_path, write_run("sift", made=made))
    assert "text-004 code stopped early exploded after step 2" in text
    assert "1 case in all arms." in text


def test_many_failures_are_counted_and_cut(
    write_run: RunWriter, make_predictions: MakePredictions, failed: Fail, tmp_path: Path
) -> None:
    made = make_predictions("sift", num_queries=60)
    made = [failed(p) if n else p for n, p in enumerate(made)]
    text, _ = report(tmp_path, write_run("sift", made=made))
    assert "59 cases in all arms. The first 40 are listed." in text
    assert text.count("RuntimeError: broken") == 40


def test_worse_than_base_is_said(write_run: RunWriter, tmp_path: Path) -> None:
    text, _ = report(tmp_path, write_run("random", num_queries=40))
    assert "So adapting made predictions worse." in text


def test_more_arms_than_colors(write_run: RunWriter, tmp_path: Path) -> None:
    arms = [f"sift@{number}" for number in range(9)]
    text, names = report(tmp_path, *(write_run(arm, num_queries=6) for arm in arms))
    assert all(arm in text for arm in arms)
    assert len(names) == 5


def test_many_subsets_are_cut_in_the_chart_only(write_run: RunWriter, tmp_path: Path) -> None:
    subsets = [f"subset-{number:02d}" for number in range(60)]
    text, _ = report(tmp_path, write_run("sift", num_queries=60, subsets=subsets))
    assert all(subset in text for subset in subsets)
    assert "The 40 most improved of 60 subsets are drawn" in text


def test_an_impossible_number_of_resamples(write_run: RunWriter, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_resamples must be at least 1, found 0"):
        write_report([write_run("sift")], tmp_path / "out", num_resamples=0)
