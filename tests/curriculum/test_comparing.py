"""A whole comparison of small runs: resumed, extended, refused, shared among processes, drawn."""

import dataclasses
import re
from pathlib import Path

import pytest

from ttt_adapt.curriculum.comparing import (
    Comparison,
    ComparisonProgress,
    ComparisonSettings,
    compare_curricula,
    comparison_as_markdown,
    parse_arm,
    plan_comparison,
    read_comparison,
    write_comparison_report,
)
from ttt_adapt.curriculum.comparing.arms import Job
from ttt_adapt.curriculum.comparing.results import read_run
from ttt_adapt.curriculum.demonstration import character_model, draw_tasks
from ttt_adapt.curriculum.demonstration.characters import save_character_model
from ttt_adapt.curriculum.sampling_settings import SamplingSettings
from ttt_adapt.curriculum.selecting import CurriculumSelectionSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.training import GRPOSettings
from ttt_adapt.errors import FingerprintMismatchError, SettingsError, TaskError, UserError

TARGETS = draw_tasks({"rotl": 3, "sort": 1}, 0)
EVALUATION = draw_tasks({"rotl": 2, "sort": 2}, 1, without=TARGETS)
OTHERS = draw_tasks({"flip": 2}, 2)


def any_digit(task: Task) -> Task:
    """The same prompt with an answer that a model that knows nothing gives now and then."""
    return dataclasses.replace(task, kind="regex", answer=r"[0-9a-m].*")


CORPUS = [any_digit(t) for t in draw_tasks({"rotl": 12, "sort": 12, "swap": 12}, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("characters") / "model"
    save_character_model(character_model(0), folder)
    return folder


def small(model: Path, **changes: object) -> ComparisonSettings:
    values: dict[str, object] = {
        "model": str(model),
        "arms": ("base", "random", "nearest", "sift"),
        "seeds": (0, 1),
        "selection": CurriculumSelectionSettings(num_select=8, device="cpu"),
        "training": GRPOSettings(
            num_steps=2, prompts_per_step=2, num_generations=4, learning_rate=1e-2,
            max_completion_tokens=3, save_every=1, device="cpu",
        ),
        "sampling": SamplingSettings(num_samples=2, max_new_tokens=3, temperature=1.0),
        "num_samples_others": 2,
        "num_resamples": 50,
    }  # fmt: skip
    return ComparisonSettings.model_validate({**values, **changes})


def compare(
    settings: ComparisonSettings,
    out: Path,
    *,
    seen: list[ComparisonProgress] | None = None,
    workers: int = 0,
) -> Comparison:
    return compare_curricula(
        CORPUS,
        TARGETS,
        settings,
        out,
        evaluation=[any_digit(task) for task in EVALUATION],
        others=[any_digit(task) for task in OTHERS],
        workers=workers,
        progress=None if seen is None else seen.append,
    )


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison")
    compare(small(model), out)
    return out


def stages(seen: list[ComparisonProgress]) -> set[tuple[str, str]]:
    return {(now.stage, now.arm) for now in seen if now.stage in ("training", "sampling")}


def rewards(out: Path, arm: str, seed: int) -> object:
    run = read_run(out / Job(parse_arm(arm), seed).folder)
    assert run is not None
    return [(item.task_id, item.rewards, item.answers) for item in (*run.evaluation, *run.others)]


def test_every_arm_has_as_many_rollouts(finished: Path) -> None:
    found = read_comparison(finished)
    assert found.matched
    assert [arm.cost.num_rollouts for arm in found.arms] == [0, 16, 16, 16]
    assert [arm.num_seeds for arm in found.arms] == [2] * 4
    assert [len(arm.curve) for arm in found.arms] == [0, 2, 2, 2]
    assert found.target_shares == {"rotl": 0.75, "sort": 0.25}
    assert list(found.arms[0].other_subsets) == ["flip"]
    assert {(item.arm, item.against) for item in found.differences} >= {
        ("sift", "base"),
        ("sift", "nearest"),
    }
    for arm in found.arms[1:]:
        assert arm.choice is not None and arm.choice.num_tasks == 8
        assert sum(arm.choice.by_subset.values()) == 8


def test_random_is_drawn_for_each_seed_and_the_others_once(finished: Path) -> None:
    chosen = sorted(p.parent.relative_to(finished) for p in finished.rglob("selection.json"))
    assert list(map(str, chosen)) == [
        "curricula/nearest",
        "curricula/random/seed-0",
        "curricula/random/seed-1",
        "curricula/sift",
    ]
    texts = [(finished / f"curricula/random/seed-{s}/tasks.jsonl").read_text() for s in (0, 1)]
    assert texts[0] != texts[1]


def test_practising_changes_the_model_and_is_measured(finished: Path) -> None:
    assert rewards(finished, "base", 0) != rewards(finished, "nearest", 0)
    found = read_comparison(finished)
    assert found.arm("base").rates.num_completions == 2 * 4 * 2
    assert not list(finished.rglob("checkpoints"))
    assert len(list(finished.rglob("training/model"))) == 6


def test_what_is_finished_is_not_done_again(model: Path, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("result.json")}
    seen: list[ComparisonProgress] = []
    again = compare(small(model), finished, seen=seen)
    assert stages(seen) == set()
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("result.json")} == before
    assert comparison_as_markdown(again) == (finished / "comparison.md").read_text()


def test_two_processes_give_the_same(model: Path, finished: Path, tmp_path: Path) -> None:
    seen: list[ComparisonProgress] = []
    compare(small(model, arms=("base", "nearest")), tmp_path, workers=2, seen=seen)
    assert {now.runs_done for now in seen} >= {0, 4}
    for arm in ("base", "nearest"):
        for seed in (0, 1):
            assert rewards(tmp_path, arm, seed) == rewards(finished, arm, seed)


def test_an_interrupted_comparison_goes_on_to_the_same_end(
    model: Path, finished: Path, tmp_path: Path
) -> None:
    settings = small(model, arms=("base", "nearest"), seeds=(0,))

    def stop(now: ComparisonProgress) -> None:
        if now.stage == "training" and now.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_curricula(
            CORPUS, TARGETS, settings, tmp_path,
            evaluation=[any_digit(task) for task in EVALUATION],
            others=[any_digit(task) for task in OTHERS],
            progress=stop,
        )  # fmt: skip
    seen: list[ComparisonProgress] = []
    compare(settings, tmp_path, seen=seen)
    assert not [now for now in seen if now.arm == "base, seed 0"]
    assert rewards(tmp_path, "nearest", 0) == rewards(finished, "nearest", 0)
    wider = settings.model_copy(update={"arms": ("base", "nearest", "sift@0.1")})
    seen.clear()
    compare(wider, tmp_path, seen=seen)
    assert {arm for _, arm in stages(seen)} == {"sift@0.1, seed 0"}


def test_another_comparison_is_refused(model: Path, finished: Path) -> None:
    other = small(model, sampling=SamplingSettings(num_samples=4, max_new_tokens=3))
    with pytest.raises(FingerprintMismatchError, match="found another settings"):
        compare(other, finished)
    with pytest.raises(FingerprintMismatchError, match="found another targets, evaluation, others"):
        compare_curricula(CORPUS, EVALUATION, small(model), finished)


def test_a_corpus_that_gives_answers_away_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"1 tasks of the corpus .* decontaminate"):
        compare_curricula([*CORPUS, EVALUATION[0]], TARGETS, small(model), tmp_path / "c",
                          evaluation=EVALUATION)  # fmt: skip
    assert not (tmp_path / "c").exists()


def test_the_page_stands_alone(finished: Path, tmp_path: Path) -> None:
    files = write_comparison_report(finished, tmp_path)
    page = files[0].read_text()
    assert files[0].name == "report.html"
    assert {path.name for path in files[1:]} >= {"arms.png", "learning.png", "choices.png"}
    assert page.count("<svg") == len(files) - 1
    for part in ("What was practised", "What was forgotten", "Each task", "Cost", "round"):
        assert part in page or part == "round"
    assert not re.search(r'(?:src|href)="(?!#)', page)
    again = write_comparison_report(finished, tmp_path / "single.html")
    assert again[0].read_text() == page


def test_a_plan_counts_what_is_left(model: Path, finished: Path, tmp_path: Path) -> None:
    settings = small(model)
    plan = plan_comparison(
        CORPUS, TARGETS, settings, tmp_path, evaluation=EVALUATION, others=OTHERS
    )
    assert (plan.num_runs, plan.num_finished, plan.steps_per_run) == (8, 0, 2)
    assert (plan.rollouts_per_run, plan.num_rollouts_left) == (16, 6 * 16)
    assert (plan.attempts_per_run, plan.num_attempts_left) == (12, 8 * 12)
    done = plan_comparison(
        CORPUS, TARGETS, settings, finished, evaluation=EVALUATION, others=OTHERS
    )
    assert (done.num_finished, done.num_rollouts_left, done.num_attempts_left) == (8, 0, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sfit", "expected base, random, nearest, round-robin, sift, or sift@λ"),
        ("nearest@1", "expected λ after sift only"),
        ("sift@", "expected a positive number after @"),
        ("sift@-1", "expected a positive number after @"),
        ("sift@inf", "expected a positive number after @"),
    ],
)
def test_arms_that_nothing_has(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_arm(name)


def test_settings_that_contradict(model: Path) -> None:
    with pytest.raises(ValueError, match="each once"):
        small(model, arms=("base", "base"))
    with pytest.raises(ValueError, match=r"at most sampling.num_samples \(2\), found 4"):
        small(model, ks=(1, 4))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="curriculum compare"):
        read_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(UserError, match="expected a comparison"):
        read_comparison(tmp_path)
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(UserError, match="delete the file"):
        read_run(tmp_path)
