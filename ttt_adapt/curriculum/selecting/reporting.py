"""From a choice to its report.

Shape legend: K candidates, M targets, N picks, D width.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ttt_adapt.curriculum.selecting.embedding import EmbeddedTasks
from ttt_adapt.curriculum.selecting.measures import (
    coverage,
    effective_rank,
    mean_cosine,
    mean_vector,
    variance_left,
)
from ttt_adapt.curriculum.selecting.noise import NoiseSuggestion
from ttt_adapt.curriculum.selecting.report import SelectionReport, TargetCoverage
from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.selection.pool import Float64Array, Pool
from ttt_adapt.types import FloatArray, IntArray

_SAMPLE = 8192
_FAR_FROM_SUGGESTION = 10.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, from what, and how.

    Attributes:
        corpus: as given.
        targets: as given, M.
        tasks: chosen, N, in order.
        pool: candidates ``[K, D]``, targets ``[M, D]`` and λ.
        order: int64 ``[N]`` positions in the pool.
        left: ``[N]`` share of the targets' variance left after each pick.
        of_targets: ``[M]`` largest similarity of each target with a candidate.
        suggestion: of λ.
        settings: as given.
        num_evaluation_only: tasks of the corpus that are no candidates.
        num_dissimilar: candidates that were not considered.
        seconds: by stage.
    """

    corpus: Sequence[Task]
    targets: Sequence[Task]
    tasks: tuple[Task, ...]
    pool: Pool
    order: IntArray
    left: FloatArray
    of_targets: FloatArray
    suggestion: NoiseSuggestion
    settings: CurriculumSelectionSettings
    num_evaluation_only: int
    num_dissimilar: int
    seconds: dict[str, float]


def describe(choice: Choice, embedded: EmbeddedTasks) -> SelectionReport:
    """The report of a choice."""
    started = time.perf_counter()
    pool, targets_MD = choice.pool, choice.pool.queries
    picks_ND = pool.rows(choice.order)
    sample = np.random.default_rng(choice.settings.seed).permutation(pool.num_candidates)
    sampled = embedded.candidates[np.sort(sample[:_SAMPLE])]
    there, taken = (Counter(task.source for task in some) for some in (choice.corpus, choice.tasks))
    corpus_rank = effective_rank(sampled)
    entries, mean_similarity = _entries(choice, picks_ND)
    report = SelectionReport(
        method=choice.settings.method,
        embedder=embedded.description,
        embedder_fingerprint=embedded.fingerprint,
        dimension=embedded.candidates.shape[1],
        num_tasks=len(choice.corpus),
        num_evaluation_only=choice.num_evaluation_only,
        num_dissimilar=choice.num_dissimilar,
        num_targets=len(choice.targets),
        num_selected=len(choice.tasks),
        noise_var=pool.noise_var,
        suggested_noise_var=choice.suggestion.noise_var,
        noise_reason=choice.suggestion.reason,
        mean_similarity=mean_similarity,
        corpus_similarity=float(mean_vector(embedded.candidates) @ targets_MD.mean(axis=0)),
        diversity=1.0 - mean_cosine(picks_ND),
        corpus_diversity=1.0 - mean_cosine(sampled),
        variance_left=float(choice.left[-1]),
        variance_curve=tuple(
            (count, float(choice.left[count - 1])) for count in curve_points(len(choice.order))
        ),
        effective_rank=effective_rank(picks_ND),
        target_rank=effective_rank(targets_MD),
        corpus_rank=corpus_rank,
        by_source={source: (there[source], taken[source]) for source in sorted(there)},
        targets=entries,
        warnings=tuple(_warnings(choice, corpus_rank)),
        seconds=choice.seconds,
    )
    choice.seconds["report"] = time.perf_counter() - started
    return report


def curve_points(num_picks: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … and the last."""
    points = [step * 10**power for power in range(9) for step in (1, 2, 5)]
    return [*(point for point in points if point < num_picks), num_picks]


def _entries(choice: Choice, picks_ND: Float64Array) -> tuple[tuple[TargetCoverage, ...], float]:
    targets_MD = choice.pool.queries
    covered = coverage(picks_ND, targets_MD)
    left = variance_left(picks_ND, targets_MD, choice.pool.noise_var)
    own = np.einsum("md,md->m", targets_MD, targets_MD)
    shares = left / np.where(own > 0.0, own, 1.0)
    best = np.maximum(choice.of_targets, covered.similarity)
    entries = tuple(
        TargetCoverage(
            target_id=target.id,
            similarity=float(covered.similarity[row]),
            best_similarity=float(best[row]),
            nearest_id=choice.tasks[int(covered.pick[row])].id,
            num_tasks=int(covered.num_picks[row]),
            variance_left=float(shares[row]),
        )
        for row, target in enumerate(choice.targets)
    )
    return entries, covered.mean_similarity


def _warnings(choice: Choice, corpus_rank: float) -> list[str]:
    found = []
    num, asked = len(choice.tasks), choice.settings.num_select
    suggested, used = choice.suggestion.noise_var, choice.pool.noise_var
    if num < asked:
        found.append(
            f"asked for {asked:,} tasks, only {num:,} may be chosen: there was nothing to choose"
        )
    elif num > corpus_rank:
        found.append(
            f"{num:,} tasks exceed the vectors' effective rank of {corpus_rank:.1f}: later picks "
            "repeat directions, and with a small λ they turn to tasks that have little to do with "
            "the targets"
        )
    if choice.settings.method == "sift" and suggested / used > _FAR_FROM_SUGGESTION:
        found.append(
            f"λ = {used:g} is far below the suggested {suggested:g}: expect picks for diversity's "
            "sake; leave noise_var out to use the suggestion"
        )
    elif choice.settings.method == "sift" and used / suggested > _FAR_FROM_SUGGESTION:
        found.append(
            f"λ = {used:g} is far above the suggested {suggested:g}: expect most picks near the "
            "majority of the targets; leave noise_var out to use the suggestion"
        )
    problems = {target.problem.strip() for target in choice.targets}
    num_equal = sum(task.problem.strip() in problems for task in choice.tasks)
    if num_equal:
        found.append(
            f"{num_equal:,} chosen tasks have the same text as a target; decontaminate the corpus"
        )
    return found
