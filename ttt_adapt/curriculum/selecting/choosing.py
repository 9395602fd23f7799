"""From a corpus and targets to a curriculum: embed, choose, report.

Shape legend: K candidates, M targets, N picks, D width.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttt_adapt.curriculum.selecting.curricula import Curriculum
from ttt_adapt.curriculum.selecting.embedders import TaskEmbedder, load_task_embedder
from ttt_adapt.curriculum.selecting.embedding import (
    EmbeddedTasks,
    StageProgress,
    embed_for_selection,
)
from ttt_adapt.curriculum.selecting.measures import best_similarities
from ttt_adapt.curriculum.selecting.noise import noise_for
from ttt_adapt.curriculum.selecting.reporting import Choice, describe
from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.curriculum.selecting.turns import round_robin
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import TaskError
from ttt_adapt.selection.greedy import sift
from ttt_adapt.selection.pool import Pool, read_pool
from ttt_adapt.selection.posterior import as_selection
from ttt_adapt.selection.relevance import by_relevance
from ttt_adapt.types import FloatArray, IntArray


def select_curriculum(
    corpus: Sequence[Task],
    targets: Sequence[Task],
    settings: CurriculumSelectionSettings | None = None,
    *,
    embedder: TaskEmbedder | None = None,
    cache: str | Path | None = None,
    progress: StageProgress | None = None,
) -> Curriculum:
    """Choose the tasks of a corpus that are worth practising for some targets.

    Tasks whose ``meta.evaluation_only`` is true are never chosen (targets may be so marked); they
    are counted. Nothing else is left out: decontaminate before.

    Args:
        corpus: K tasks; answers and tests are not looked at.
        targets: the tasks at hand, M; answers are not looked at.
        settings: method, N, λ, embedder.
        embedder: instead of loading the one that settings describe, e.g. a policy in memory.
        cache: folder for vectors, so that another call (or one after a kill) need not embed again.
        progress: see :data:`~ttt_adapt.curriculum.selecting.embedding.StageProgress`.

    Returns:
        N tasks in order of picking (all of them where there are fewer), and a report.

    Raises:
        TaskError: no targets, nothing to choose from, or two tasks of the corpus have one id.
        ModelError, SettingsError: the embedder.

    Source: SIFT over a whole corpus for joint targets: Hübotter et al. 2025 (TTC-RL); λ: see
    :func:`~ttt_adapt.curriculum.selecting.noise.suggested_noise_var`.
    """
    settings = settings or CurriculumSelectionSettings()
    eligible = eligible_positions(corpus, targets)
    if embedder is None:
        embedder = load_task_embedder(settings)
    started = time.perf_counter()
    embedded = embed_for_selection(
        [corpus[position] for position in eligible.tolist()],
        targets,
        embedder,
        cache=None if cache is None else Path(cache),
        progress=progress,
    )
    embed_s = time.perf_counter() - started
    return choose_embedded(
        corpus, targets, eligible, embedded, settings, progress=progress, embed_s=embed_s
    )


def eligible_positions(corpus: Sequence[Task], targets: Sequence[Task]) -> IntArray:
    """Positions of tasks that may be chosen.

    Raises:
        TaskError: none, no targets, or an id that two tasks have.
    """
    if not targets:
        raise TaskError("expected at least one target to choose tasks for, found none")
    seen: set[str] = set()
    for task in corpus:
        if task.id in seen:
            raise TaskError(
                f"two tasks of the corpus have the id {task.id!r:.80}; rename one, or name the "
                "sources apart when importing"
            )
        seen.add(task.id)
    eligible = [place for place, task in enumerate(corpus) if not task.meta.get("evaluation_only")]
    if not eligible:
        raise TaskError(
            f"nothing to choose from: all {len(corpus)} tasks of the corpus are marked "
            "evaluation_only; add tasks that may be trained on"
            if corpus
            else "nothing to choose from: the corpus has no tasks"
        )
    return np.asarray(eligible, dtype=np.int64)


def choose_embedded(
    corpus: Sequence[Task],
    targets: Sequence[Task],
    eligible: IntArray,
    embedded: EmbeddedTasks,
    settings: CurriculumSelectionSettings,
    *,
    num_evaluation_only: int | None = None,
    progress: StageProgress | None = None,
    embed_s: float = 0.0,
) -> Curriculum:
    """Choose among candidates that are embedded already.

    Args:
        eligible: int64 ``[K]`` positions in the corpus of ``embedded.candidates``.
        num_evaluation_only: tasks of the corpus that must not be trained on; ``None``: all others.
    """
    if num_evaluation_only is None:
        num_evaluation_only = len(corpus) - len(eligible)
    started = time.perf_counter()
    num_select = min(settings.num_select, len(eligible))
    pool = read_pool(embedded.candidates, embedded.targets, num_select=num_select, noise_var=1.0)
    in_turn = round_robin(pool)
    suggestion = noise_for(pool, in_turn)
    noise_var = settings.noise_var if settings.noise_var is not None else suggestion.noise_var
    pool = Pool(pool.candidates, pool.queries, num_select, noise_var)
    of_targets, of_candidates = best_similarities(embedded.candidates, embedded.targets)
    considered = np.arange(pool.num_candidates)
    if settings.method == "sift":
        considered = _similar_enough(of_candidates, num_select, settings.min_similarity)
    order, left = _pick(pool, considered, in_turn, settings, progress)
    indices = eligible[order]
    choice = Choice(
        corpus=corpus,
        targets=targets,
        tasks=tuple(corpus[position] for position in indices.tolist()),
        pool=pool,
        order=order,
        left=left,
        of_targets=of_targets,
        suggestion=suggestion,
        settings=settings,
        num_evaluation_only=num_evaluation_only,
        num_dissimilar=pool.num_candidates - len(considered),
        seconds={"embed": embed_s, "select": time.perf_counter() - started},
    )
    report = describe(choice, embedded)
    return Curriculum(choice.tasks, indices, settings.method, noise_var, settings, report)


def _similar_enough(similarity_K: FloatArray, num_select: int, min_similarity: float) -> IntArray:
    """Ascending positions of candidates that SIFT considers."""
    similar = np.flatnonzero(similarity_K > min_similarity)
    if len(similar) >= num_select or min_similarity <= -1.0:
        return similar if min_similarity > -1.0 else np.arange(len(similarity_K))
    return np.sort(np.argsort(-similarity_K, kind="stable")[:num_select])


def _pick(
    pool: Pool,
    considered: IntArray,
    in_turn: list[int],
    settings: CurriculumSelectionSettings,
    progress: StageProgress | None,
) -> tuple[IntArray, FloatArray]:
    """Positions by the method asked for, and the share of variance left after each."""
    if settings.method == "sift":
        done = 0

        def step(num_picked: int) -> None:
            nonlocal done
            done += num_picked
            if progress is not None:
                progress("select", done, pool.num_select)

        everything = len(considered) == pool.num_candidates
        selection = sift(
            pool.candidates if everything else pool.candidates[considered],
            pool.queries,
            num_select=pool.num_select,
            noise_var=pool.noise_var,
            allow_repeats=False,
            progress=step,
        )
        positions = considered[selection.indices]
    else:
        if settings.method == "round-robin":
            order: Any = in_turn
        elif settings.method == "nearest":
            mean = Pool(pool.candidates, pool.queries.mean(axis=0, keepdims=True), 1, 1.0)
            order = by_relevance(mean)[: pool.num_select]
        else:
            shuffled = np.random.default_rng(settings.seed).permutation(pool.num_candidates)
            order = shuffled[: pool.num_select]
        selection = as_selection(pool, order, settings.method)
        positions = selection.indices
        if progress is not None:
            progress("select", pool.num_select, pool.num_select)
    return positions, selection.posterior_var / (selection.prior_var or 1.0)
