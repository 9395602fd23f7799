"""Choosing a curriculum: methods against slow references, what is left out, choosing again."""

import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.curriculum import CurriculumSelectionSettings, Task, select_curriculum
from ttt_adapt.curriculum.selecting import EncoderOfTasks, Reselection, load_task_embedder, turns
from ttt_adapt.curriculum.selecting.band import expected_pass_rates
from ttt_adapt.curriculum.selecting.choosing import choose_embedded
from ttt_adapt.curriculum.selecting.embedding import EmbeddedTasks
from ttt_adapt.curriculum.selecting.turns import round_robin
from ttt_adapt.embedding.hashing import HashingEmbedder
from ttt_adapt.errors import TaskError
from ttt_adapt.selection import sift
from ttt_adapt.selection.pool import Pool, read_pool

FAMILIES = {
    "sum": "Add the numbers {a} and {b} together and say the sum.",
    "reverse": "Reverse the letters of the word {a}{b} from last to first.",
    "capital": "Name the capital city of country number {a} on continent {b}.",
}
Settings = CurriculumSelectionSettings


def tasks(family: str, num: int, first: int = 0, **meta: object) -> list[Task]:
    return [
        Task(
            f"{family}/{number}",
            "exact",
            FAMILIES[family].format(a=number, b=number * 7 % 31),
            "x",
            source=family,
            meta=meta,
        )
        for number in range(first, first + num)
    ]


@pytest.fixture(scope="module")
def corpus() -> list[Task]:
    return [*tasks("sum", 20), *tasks("reverse", 20), *tasks("capital", 20)]


def hashing(**changes: object) -> CurriculumSelectionSettings:
    return Settings.model_validate({"embedder": "hashing", "num_select": 12, **changes})


@pytest.mark.parametrize("method", ["sift", "nearest", "round-robin"])
def test_tasks_of_the_targets_family_are_chosen(corpus: list[Task], method: str) -> None:
    targets = tasks("reverse", 4, first=100)
    found = select_curriculum(corpus, targets, hashing(method=method))
    assert {task.source for task in found.tasks} == {"reverse"}
    assert found.report.by_source == {"capital": (20, 0), "reverse": (20, 12), "sum": (20, 0)}
    assert [corpus[position] for position in found.indices] == list(found.tasks)
    assert len({task.id for task in found.tasks}) == 12
    assert found.method == method
    assert found.report.mean_similarity > found.report.corpus_similarity
    again = select_curriculum(corpus, targets, hashing(method=method))
    assert again.tasks == found.tasks


def test_sift_is_the_selection_rooms(corpus: list[Task]) -> None:
    """With its options: no repeats, tasks that are similar to no target left aside."""
    targets = [*tasks("reverse", 4, first=100), *tasks("sum", 2, first=100)]
    embedder = load_task_embedder(hashing())
    vectors = embedder.embed(embedder.texts(corpus))
    wanted = embedder.embed(embedder.texts(targets))
    for least in (-1.0, 0.3):
        chosen = select_curriculum(
            corpus, targets, hashing(noise_var=0.3, min_similarity=least), embedder=embedder
        )
        near = np.flatnonzero((vectors @ wanted.T).max(axis=1) > least)
        direct = sift(vectors[near], wanted, num_select=12, noise_var=0.3, allow_repeats=False)
        np.testing.assert_array_equal(chosen.indices, near[direct.indices])
        assert chosen.report.num_dissimilar == 60 - len(near)
        assert chosen.noise_var == 0.3
        assert chosen.report.variance_left == pytest.approx(
            direct.posterior_var[-1] / direct.prior_var
        )


def test_fewer_similar_tasks_than_asked_are_made_up_for(corpus: list[Task]) -> None:
    targets = tasks("sum", 3, first=100)
    found = select_curriculum(corpus, targets, hashing(num_select=30, min_similarity=0.9))
    assert len(found.tasks) == 30
    assert found.report.by_source["sum"] == (20, 20)
    assert found.report.num_dissimilar == 30


def test_opposite_vectors_are_not_chosen() -> None:
    """To a linear kernel −x is as telling as x; a curriculum wants x."""
    rng = np.random.default_rng(0)
    target = rng.standard_normal(16)
    rows = np.concatenate([target + rng.standard_normal((30, 16)), -target + np.zeros((30, 16))])
    corpus = [Task(str(number), "exact", str(number), "a") for number in range(60)]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    embedded = EmbeddedTasks(rows.astype(np.float32), rows[:4].astype(np.float32), "given", "f")
    for least, num_opposite in ((0.0, 0), (-1.0, 10)):
        chosen = choose_embedded(
            corpus,
            corpus[:4],
            np.arange(60),
            embedded,
            Settings(num_select=10, min_similarity=least, noise_var=100.0),
        )
        assert int((chosen.indices >= 30).sum()) == num_opposite


def test_random_draws_from_the_whole_corpus(corpus: list[Task]) -> None:
    targets = tasks("sum", 3, first=100)
    found = [select_curriculum(corpus, targets, hashing(method="random", seed=s)) for s in (1, 2)]
    assert found[0].tasks != found[1].tasks
    assert len({task.source for task in found[0].tasks}) == 3
    again = select_curriculum(corpus, targets, hashing(method="random", seed=1))
    assert again.tasks == found[0].tasks


def test_nearest_goes_by_the_mean_of_the_targets(corpus: list[Task]) -> None:
    targets = [*tasks("reverse", 9, first=100), *tasks("sum", 1, first=100)]
    found = select_curriculum(corpus, targets, hashing(method="nearest"))
    embedder = load_task_embedder(hashing())
    scores = embedder.embed(embedder.texts(corpus)) @ embedder.embed(embedder.texts(targets)).mean(
        axis=0
    )
    assert found.indices.tolist() == np.argsort(-scores, kind="stable")[:12].tolist()
    assert "sum" not in {task.source for task in found.tasks}
    in_turn = select_curriculum(corpus, targets, hashing(method="round-robin"))
    assert "sum" in {task.source for task in in_turn.tasks}


def test_evaluation_only_is_never_chosen_and_counted(corpus: list[Task]) -> None:
    reserved = tasks("reverse", 20, first=200, evaluation_only=True)
    targets = tasks("reverse", 4, first=200, evaluation_only=True)
    for method in ("sift", "nearest", "round-robin", "random"):
        found = select_curriculum(
            [*reserved, *corpus], targets, hashing(method=method, num_select=80)
        )
        assert len(found.tasks) == 60
        assert not any(task.meta.get("evaluation_only") for task in found.tasks)
        assert found.report.num_evaluation_only == 20
        assert any("only 60 may be chosen" in warning for warning in found.report.warnings)
        assert found.indices.min() >= 20


def test_what_cannot_be_chosen_from() -> None:
    some = tasks("sum", 3)
    with pytest.raises(TaskError, match="at least one target"):
        select_curriculum(some, [], hashing())
    with pytest.raises(TaskError, match="the corpus has no tasks"):
        select_curriculum([], some, hashing())
    with pytest.raises(TaskError, match="all 2 tasks of the corpus are marked evaluation_only"):
        select_curriculum(tasks("sum", 2, evaluation_only=True), some, hashing())
    with pytest.raises(TaskError, match="two tasks of the corpus have the id 'sum/0'"):
        select_curriculum([*some, some[0]], some, hashing())


def test_progress_names_its_stages(corpus: list[Task]) -> None:
    seen: list[tuple[str, int, int]] = []
    for method in ("sift", "random"):
        seen.clear()
        select_curriculum(
            corpus,
            tasks("sum", 2, first=100),
            hashing(method=method),
            progress=lambda *step: seen.append(step),
        )
        assert ("embed targets", 2, 2) in seen
        assert ("embed corpus", 60, 60) in seen
        assert seen[-1] == ("select", 12, 12)


def test_one_task_and_equal_tasks(corpus: list[Task]) -> None:
    """Nothing to tell tasks apart by: the first ones are chosen."""
    encoder = EncoderOfTasks(HashingEmbedder(64), centred=True)
    same = [Task(str(number), "exact", "the same", "a") for number in range(5)]
    for method in ("sift", "nearest", "round-robin"):
        found = select_curriculum(same, same[:1], hashing(method=method), embedder=encoder)
        assert found.indices.tolist() == [0, 1, 2, 3, 4]
    found = select_curriculum(corpus[:1], corpus[1:2], hashing(), embedder=encoder)
    assert found.tasks == (corpus[0],)
    assert np.isfinite(found.report.variance_left)


def round_robin_by_hand(
    rows: NDArray[np.float32], targets: NDArray[np.float32], num: int
) -> list[int]:
    rankings = [
        np.lexsort((np.arange(len(rows)), -np.array([float(t @ r) for r in rows.astype(float)])))
        for t in targets.astype(float)
    ]
    picked: list[int] = []
    while len(picked) < num:
        for ranking in rankings:
            picked.append(next(int(p) for p in ranking if p not in picked))
            if len(picked) == num:
                break
    return picked


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num=st.integers(1, 60),
    num_targets=st.integers(1, 6),
    num_select=st.integers(1, 70),
    depth=st.sampled_from([1, 2**23]),
    copies=st.booleans(),
)
def test_round_robin_matches_one_by_one(
    seed: int, num: int, num_targets: int, num_select: int, depth: int, copies: bool
) -> None:
    """With lists of bounded depth too, and with ties at their end."""
    rng = np.random.default_rng(seed)
    # Few distinct values: inner products are exact and tie often.
    rows = rng.integers(-2, 3, (num, 3)).astype(np.float32)
    if copies:
        rows[rng.integers(num, size=num)] = rows[0]
    targets = rng.integers(-2, 3, (num_targets, 3)).astype(np.float32)
    pool = read_pool(rows, targets, num_select=num_select, noise_var=1.0)
    wanted = min(num_select, num)
    served = targets
    if num_targets > wanted:
        served = targets[np.linspace(0, num_targets - 1, wanted).round().astype(int)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "_MAX_ENTRIES", depth)
        assert round_robin(pool) == round_robin_by_hand(rows, served, wanted)


def test_choosing_again_keeps_to_the_band(corpus: list[Task]) -> None:
    targets = tasks("reverse", 4, first=100)
    again = Reselection(corpus, targets, hashing(num_select=6))
    first = again.choose({})
    assert first.tasks == select_curriculum(corpus, targets, hashing(num_select=6)).tasks
    rates = {task.id: 1.0 for task in first.tasks}
    second = again(rates, step=10, band=(0.25, 0.6))
    assert len(second) == 6
    assert not {task.id for task in second} & set(rates)
    inside = {task.id: 0.4 for task in tasks("reverse", 20)}
    third = again.choose({**inside, **{task.id: 0.0 for task in tasks("sum", 20)}})
    assert {task.source for task in third.tasks} == {"reverse"}
    assert third.report.num_evaluation_only == 0


def test_too_few_in_the_band_are_filled_up_from_beside_it(corpus: list[Task]) -> None:
    again = Reselection(corpus, tasks("sum", 2, first=100), hashing(num_select=8))
    rates = {task.id: 0.9 for task in corpus} | {task.id: 0.7 for task in corpus[:6]}
    chosen = again.choose(rates | {"of another corpus": 0.5}, band=(0.2, 0.6))
    assert {task.id for task in corpus[:6]} < {task.id for task in chosen.tasks}
    assert len(chosen.tasks) == 8


@pytest.mark.parametrize("band", [(0.6, 0.2), (-0.1, 0.5), (0.5, 1.5)])
def test_bands_and_rates_outside_0_to_1_are_refused(
    corpus: list[Task], band: tuple[float, float]
) -> None:
    again = Reselection(corpus, corpus[:1], hashing())
    with pytest.raises(TaskError, match="band: expected"):
        again.choose({}, band=band)
    with pytest.raises(TaskError, match="pass rates: expected 0 to 1, found 2 to 2"):
        again.choose({corpus[0].id: 2.0})


@pytest.mark.parametrize("num_known", [5, 90])
def test_expected_pass_rates_are_a_ridge_regression(num_known: int) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((120, 12)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    known, rates = np.arange(num_known), rng.random(num_known)
    wide = rows.astype(np.float64)
    kernel = wide[known] @ wide[known].T + np.eye(num_known)
    slow = rates.mean() + wide @ wide[known].T @ np.linalg.solve(kernel, rates - rates.mean())
    found = expected_pass_rates(rows, known, rates)
    np.testing.assert_allclose(found, np.clip(slow, 0.0, 1.0), atol=1e-5)


def peak_of(call: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_fifty_thousand_tasks_in_bounded_memory() -> None:
    """50,000 × 512 (98 MB), 200 targets: at most one copy of what is considered, and little more."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50_000, 512), dtype=np.float32)
    rows += 2.0 * rows[rng.integers(0, 20, 50_000)]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    corpus = [Task(str(number), "exact", str(number), "a") for number in range(50_000)]
    targets = rows[:200] + 0.02 * rng.standard_normal((200, 512), dtype=np.float32)
    embedded = EmbeddedTasks(rows, targets, "given", "f")
    positions = np.arange(50_000)

    def choose(method: str) -> Callable[[], object]:
        wanted = Settings.model_validate({"method": method, "num_select": 30})
        return lambda: choose_embedded(corpus, corpus[:200], positions, embedded, wanted)

    assert peak_of(choose("sift")) < 98.0 + 60.0
    assert peak_of(choose("round-robin")) < 60.0


def test_a_pool_is_only_read(corpus: list[Task]) -> None:
    rows = np.random.default_rng(2).standard_normal((60, 8)).astype(np.float32)
    rows.setflags(write=False)
    pool = Pool(rows, rows[:3].astype(np.float64), 5, 1.0)
    assert len(round_robin(pool)) == 5


def test_any_sequence_of_tasks_will_do(corpus: list[Task]) -> None:
    given: Sequence[Task] = tuple(corpus)
    assert select_curriculum(given, given[:1], hashing(num_select=1)).tasks[0] == corpus[0]
