"""λ, the report of a selection, and the folder of a curriculum."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ttt_adapt.curriculum import (
    Curriculum,
    CurriculumSelectionSettings,
    Task,
    read_curriculum,
    select_curriculum,
    write_curriculum,
)
from ttt_adapt.curriculum.selecting import noise as noise_module
from ttt_adapt.curriculum.selecting import suggested_noise_var
from ttt_adapt.curriculum.selecting.choosing import choose_embedded
from ttt_adapt.curriculum.selecting.embedding import EmbeddedTasks
from ttt_adapt.curriculum.selecting.measures import (
    coverage,
    effective_rank,
    mean_cosine,
    unit_rows_in_place,
    variance_left,
)
from ttt_adapt.curriculum.selecting.noise import SIGNAL_LEFT
from ttt_adapt.curriculum.selecting.report import report_as_markdown
from ttt_adapt.curriculum.selecting.reporting import curve_points
from ttt_adapt.curriculum.selecting.turns import round_robin
from ttt_adapt.errors import SelectionError, SettingsError, TaskError
from ttt_adapt.selection import Posterior
from ttt_adapt.selection.pool import read_pool

Settings = CurriculumSelectionSettings
Matrix = NDArray[np.float64]
NUM_FAMILIES = 12


def families(
    seed: int, num: int, width: int, mix: tuple[int, ...], spread: float = 1.0
) -> tuple[EmbeddedTasks, NDArray[np.int64]]:
    """Centred unit rows around twelve centres, and targets: ``mix[f]`` of family f."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((NUM_FAMILIES, width))
    family = rng.integers(0, NUM_FAMILIES, num)
    wanted = np.repeat(np.arange(len(mix)), mix)
    rows = centres[family] + spread * rng.standard_normal((num, width))
    targets = centres[wanted] + spread * rng.standard_normal((len(wanted), width))
    centre = rows.mean(axis=0)
    unit_rows_in_place(rows, centre)
    unit_rows_in_place(targets, centre)
    made = EmbeddedTasks(rows.astype(np.float32), targets.astype(np.float32), "drawn", "0" * 64)
    return made, family


def numbered(num: int, name: str = "task") -> list[Task]:
    return [
        Task(f"{name}/{n}", "exact", f"{name} {n} asks", "a", source=f"s{n % 3}")
        for n in range(num)
    ]


def choose(
    embedded: EmbeddedTasks, num_select: int, noise_var: float | None = None, method: str = "sift"
) -> Curriculum:
    num = len(embedded.candidates)
    wanted = Settings.model_validate(
        {"num_select": num_select, "noise_var": noise_var, "method": method}
    )
    targets = numbered(len(embedded.targets), "target")
    return choose_embedded(numbered(num), targets, np.arange(num), embedded, wanted)


@pytest.mark.parametrize(("num_select", "width"), [(20, 24), (60, 24)])
def test_the_suggestion_leaves_the_share_it_names(num_select: int, width: int) -> None:
    """Against the definition: covariances with the picks, before and after observing them."""
    embedded, _ = families(0, 400, width, (10, 4))
    pool = read_pool(embedded.candidates, embedded.targets, num_select=num_select, noise_var=1.0)
    picks = pool.rows(round_robin(pool))
    found = suggested_noise_var(embedded.candidates, embedded.targets, num_select=num_select)
    sigma = np.linalg.inv(np.eye(width) + picks.T @ picks / found.noise_var)
    before = np.sum((pool.queries @ picks.T) ** 2)
    after = np.sum((pool.queries @ sigma @ picks.T) ** 2)
    assert np.sqrt(after / before) == pytest.approx(SIGNAL_LEFT, rel=0.05)
    assert f"λ = {found.noise_var:g}" in found.reason


def test_more_picks_and_closer_ones_ask_for_more_noise() -> None:
    embedded, _ = families(1, 500, 32, (12,))
    several = [
        suggested_noise_var(embedded.candidates, embedded.targets, num_select=num).noise_var
        for num in (5, 20, 40)
    ]
    assert several == sorted(several) and several[0] < several[-1]
    close, _ = families(1, 500, 32, (12,), spread=0.5)
    closer = suggested_noise_var(close.candidates, close.targets, num_select=20).noise_var
    assert closer > several[1]
    longer = suggested_noise_var(3.0 * close.candidates, close.targets, num_select=20).noise_var
    assert longer == pytest.approx(9.0 * closer, rel=0.1)


def test_many_picks_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded, _ = families(2, 500, 16, (12, 4))
    whole = suggested_noise_var(embedded.candidates, embedded.targets, num_select=200).noise_var
    monkeypatch.setattr(noise_module, "_MAX_ROWS", 100)
    part = suggested_noise_var(embedded.candidates, embedded.targets, num_select=200).noise_var
    assert part == pytest.approx(whole, rel=0.15)


def test_targets_that_nothing_has_to_do_with() -> None:
    rows = np.eye(6, dtype=np.float32)
    found = suggested_noise_var(rows[:3], rows[5:], num_select=2)
    assert found.noise_var == 1.0
    assert "anything in common" in found.reason
    with pytest.raises(SelectionError, match="one width"):
        suggested_noise_var(rows, rows[:, :3], num_select=2)
    with pytest.raises(SelectionError, match="signal_left: expected a number between 0 and 1"):
        suggested_noise_var(rows, rows, num_select=2, signal_left=1.0)


def test_the_suggestion_beats_a_small_default() -> None:
    """One family: most picks are of it. Three: the small ones get theirs, unlike by the mean."""
    for seed in range(3):
        single, family = families(seed, 1500, 64, (64,))
        shares = [
            float((family[choose(single, 100, noise_var).indices] == 0).mean())
            for noise_var in (0.1, None)
        ]
        assert shares[1] > 0.65 and shares[0] < 0.45
        mixed, family = families(seed, 1500, 64, (48, 12, 4))
        counts = {
            method: np.bincount(
                family[choose(mixed, 100, method=method).indices], minlength=NUM_FAMILIES
            )[:3]
            for method in ("sift", "nearest")
        }
        assert counts["sift"].sum() > 65
        assert counts["sift"].min() >= 10
        assert counts["nearest"].min() == 0


def test_measures_against_their_definitions() -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, 7))
    unit_rows_in_place(rows)
    cosines = rows @ rows.T
    assert effective_rank(rows) == pytest.approx(1.0 / np.mean(cosines**2))
    assert effective_rank(rows[:4]) == pytest.approx(1.0 / np.mean(cosines[:4, :4] ** 2))
    assert effective_rank(np.zeros((3, 2))) == 0.0
    assert effective_rank(np.tile(rows[0], (9, 1))) == pytest.approx(1.0)
    assert mean_cosine(rows) == pytest.approx((cosines.sum() - 40) / (40 * 39))
    assert mean_cosine(rows[:1]) == 1.0
    assert curve_points(1) == [1]
    assert curve_points(30) == [1, 2, 5, 10, 20, 30]


@pytest.mark.parametrize("num_picks", [5, 30])
def test_variance_left_and_coverage_of_each_target(num_picks: int) -> None:
    rng = np.random.default_rng(4)
    picks, targets = rng.standard_normal((num_picks, 11)), rng.standard_normal((6, 11))
    unit_rows_in_place(picks)
    unit_rows_in_place(targets)
    each = []
    for target in targets:
        posterior = Posterior(target[None, :], 0.3)
        for pick in picks:
            posterior.pick(pick)
        each.append(posterior.total_var)
    np.testing.assert_allclose(variance_left(picks, targets, 0.3), each, rtol=1e-9)
    covered = coverage(picks, targets)
    products = targets @ picks.T
    np.testing.assert_array_equal(covered.pick, products.argmax(axis=1))
    np.testing.assert_allclose(covered.similarity, products.max(axis=1))
    assert covered.num_picks.tolist() == np.bincount(products.argmax(0), minlength=6).tolist()
    assert covered.mean_similarity == pytest.approx(products.mean())


def test_the_report_says_what_was_chosen() -> None:
    embedded, _ = families(5, 300, 32, (6, 2))
    made = choose(embedded, 25)
    report = made.report
    picks = embedded.candidates[made.indices].astype(np.float64)
    assert made.noise_var == report.noise_var == report.suggested_noise_var
    assert report.num_tasks == 300 and report.num_targets == 8 and report.num_selected == 25
    shares = [target.variance_left for target in report.targets]
    assert np.mean(shares) == pytest.approx(report.variance_left, rel=1e-5)
    assert [count for count, _ in report.variance_curve] == [1, 2, 5, 10, 20, 25]
    assert report.variance_curve[-1][1] == report.variance_left
    assert sum(target.num_tasks for target in report.targets) == 25
    assert all(t.similarity <= t.best_similarity + 1e-6 for t in report.targets)
    assert report.diversity == pytest.approx(1.0 - mean_cosine(picks))
    assert report.mean_similarity == pytest.approx(float((picks @ embedded.targets.T).mean()))
    assert report.corpus_similarity == pytest.approx(
        float((embedded.candidates @ embedded.targets.T).mean()), abs=1e-6
    )
    assert set(report.seconds) == {"embed", "select", "report"}


def test_warnings() -> None:
    embedded, _ = families(6, 300, 16, (6,))
    few = choose(embedded, 2)
    assert few.report.warnings == ()
    many = choose(embedded, 100)
    assert any("exceed the vectors' effective rank" in text for text in many.report.warnings)
    small = choose(embedded, 100, noise_var=0.01)
    assert any("far below the suggested" in text for text in small.report.warnings)
    large = choose(embedded, 100, noise_var=1e5)
    assert any("far above the suggested" in text for text in large.report.warnings)
    by_mean = choose(embedded, 100, noise_var=1e5, method="nearest")
    assert not any("suggested" in text for text in by_mean.report.warnings)
    wanted = Settings(embedder="hashing", num_select=2)
    same = select_curriculum(numbered(3), [Task("t", "exact", "task 1 asks ", "a")], wanted)
    assert any("1 chosen tasks have the same text as a target" in w for w in same.report.warnings)


def test_the_report_for_people() -> None:
    embedded, _ = families(7, 100, 16, (30,))
    report = choose(embedded, 10).report
    report = dataclasses.replace(
        report, num_evaluation_only=7, by_source={"a|b\n": (5, 1), "": (1, 0)}, warnings=("beware",)
    )
    text = report_as_markdown(report, [("task/1", "a `long` | text " * 40)])
    assert text.startswith("# 10 tasks chosen for 30 targets\n")
    assert "**beware**" in text
    assert "7 more are for evaluation only" in text
    assert "| a\\|b | 5 | 1 | 10.0% |" in text
    assert "| (none) | 1 | 0 | 0.0% |" in text
    assert "## The 20 targets served least" in text
    assert "…" in text.splitlines()[-1]
    cells = [line.replace("\\|", "").count("|") for line in text.splitlines()]
    assert all(a == b for a, b in pairwise(cells) if a and b), "rows of one table differ"


def test_folders_are_read_back(tmp_path: Path) -> None:
    embedded, _ = families(8, 60, 16, (5, 2))
    made = choose(embedded, 12)
    place = write_curriculum(tmp_path / "made" / "here", made)
    assert sorted(path.name for path in place.iterdir()) == [
        "report.md",
        "selection.json",
        "tasks.jsonl",
    ]
    found = read_curriculum(place)
    np.testing.assert_array_equal(found.indices, made.indices)
    assert found.indices.dtype == np.int64
    for field in ("tasks", "method", "noise_var", "settings", "report"):
        assert getattr(found, field) == getattr(made, field), field
    other = choose(embedded, 5, method="nearest")
    assert read_curriculum(write_curriculum(place, other)).tasks == other.tasks


def test_folders_that_are_none(tmp_path: Path) -> None:
    embedded, _ = families(9, 40, 8, (3,))
    made = choose(embedded, 6)
    with pytest.raises(TaskError, match="no such file; expected a folder"):
        read_curriculum(tmp_path)
    place = write_curriculum(tmp_path / "c", made)
    report = place / "selection.json"
    sound = report.read_text(encoding="utf-8")
    values = json.loads(sound)

    def refuses(content: str, message: str, kind: type[Exception] = TaskError) -> None:
        report.write_text(content, encoding="utf-8")
        with pytest.raises(kind, match=message):
            read_curriculum(place)

    refuses("{", "damaged")
    refuses(json.dumps(values | {"format_version": 99}), "expected a curriculum of format 1")
    refuses(json.dumps(values | {"indices": [1]}), "as many positions as tasks")
    refuses(json.dumps(values | {"report": {"format_version": 1}}), "damaged")
    refuses(json.dumps(values | {"report": None}), "damaged")
    refuses(json.dumps(values | {"settings": {"cat": 1}}), "unknown setting cat", SettingsError)
    report.write_text(sound, encoding="utf-8")
    assert read_curriculum(place).tasks == made.tasks
    (place / "tasks.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(TaskError, match="not the tasks that selection.json describes"):
        read_curriculum(place)


def test_an_interrupted_write_leaves_no_curriculum(tmp_path: Path) -> None:
    embedded, _ = families(10, 40, 8, (3,))
    place = write_curriculum(tmp_path, choose(embedded, 6))
    unwritable = dataclasses.replace(
        choose(embedded, 1), tasks=(Task("t", "exact", "p", "a", meta={"x": float("nan")}),)
    )
    with pytest.raises(TaskError, match="cannot be written as JSON"):
        write_curriculum(place, unwritable)
    with pytest.raises(TaskError, match="no such file"):
        read_curriculum(place)
