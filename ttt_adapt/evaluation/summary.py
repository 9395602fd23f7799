"""What a run found: bits per byte at each step, against the base model, failures and cost.

Choices that decide what the numbers mean:

- Bits per byte are corpus-level ratios (Σ nats / Σ bytes), overall and per subset; ratios of
  single texts are never averaged.
- Every step's figure is over the same queries: those with a finite score at every step.
- A query that failed, or has a score that is not finite, is counted and listed, never dropped in
  silence. Beside the figure over successful queries stands ``with_failures``: there a failed query
  counts with the base model's score, which is what a user whose adaptation failed would fall back
  to. (In clinical trials: intention to treat.) It needs base scores of the failed queries, from
  their own step 0 or from ``base``; where one is missing the figure is NaN, and how many is said.
- A query whose learning was stopped (``nan``, ``exploded``) has a prediction, made with the last
  good weights. It counts as successful, and is listed under ``stopped``.
- Comparisons are paired by query, with bootstrap confidence intervals stratified by subset.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.bootstrap import PairedBootstrap, paired_bootstrap
from ttt_adapt.evaluation.pile import PileAverage, are_pile_subsets, pile_average, pile_weights
from ttt_adapt.evaluation.scores import add_scores
from ttt_adapt.evaluation.serialization import from_json, loads, to_json
from ttt_adapt.storage import write_json
from ttt_adapt.types import Prediction, Score

__all__ = ["Cost", "Failure", "StepSummary", "Summary", "read_summary", "summarize"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A query without a usable score, and why."""

    query_id: str
    subset: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One evaluation point of a run.

    Attributes:
        step: training steps asked for.
        score: sums over the successful queries.
        bits_per_byte: their ratio.
        by_subset: the same sums by subset.
        bits_per_byte_by_subset: their ratios.
        pile_all: the weighted mean over subsets, where every subset is one of the Pile's.
        against_base: compared with the base model on the same queries; ``None`` without one.
        against_base_by_subset: the same within each subset.
        pile_all_against_base: the same for ``pile_all``.
        with_failures: bits per byte over all queries, where failed ones count with the base
            model's score; NaN where one of those is missing.
        num_exhausted: queries whose data allowed fewer steps: their last state was scored again.
    """

    step: int
    score: Score
    bits_per_byte: float
    by_subset: Mapping[str, Score]
    bits_per_byte_by_subset: Mapping[str, float]
    pile_all: PileAverage | None
    against_base: PairedBootstrap | None
    against_base_by_subset: Mapping[str, PairedBootstrap]
    pile_all_against_base: PairedBootstrap | None
    with_failures: float
    num_exhausted: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What the run spent, failed queries included.

    Attributes:
        seconds: total by stage.
        seconds_per_query: mean by stage, over all queries.
        tokens_trained: tokens learned on.
        tokens_scored: tokens scored, over all steps.
        num_excluded_own: passages of the queries' own documents that were left out.
        num_excluded_overlap: passages left out as near-duplicates of the query.
    """

    seconds: Mapping[str, float]
    seconds_per_query: Mapping[str, float]
    tokens_trained: int
    tokens_scored: int
    num_excluded_own: int
    num_excluded_overlap: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers.

    Attributes:
        steps: one entry an evaluation point, ascending; empty when every query failed.
        num_queries: all queries, failed ones included.
        num_successful: those that ``steps`` is about.
        failures: the others, by query id.
        num_failed_without_base: failed queries whose base score is missing.
        stopped: ids of queries whose learning ended early, by why.
        cost: what it took.
    """

    steps: tuple[StepSummary, ...]
    num_queries: int
    num_successful: int
    failures: tuple[Failure, ...]
    num_failed_without_base: int
    stopped: Mapping[str, tuple[str, ...]]
    cost: Cost

    def write(self, path: Path) -> None:
        """Write it as indented JSON, atomically."""
        write_json(path, to_json(self))

    @classmethod
    def from_json(cls, value: object, *, where: str = "summary") -> "Summary":
        """The inverse of :func:`~ttt_adapt.evaluation.serialization.to_json`."""
        return from_json(cls, value, where=where)


def summarize(
    predictions: Iterable[Prediction],
    *,
    base: Iterable[Prediction] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Summary:
    """Summarise a run.

    The result does not depend on the order of ``predictions``.

    Args:
        predictions: the run's, failed ones included.
        base: predictions whose step 0 is the base model's, for runs that did not score step 0
            themselves; where a query has both, its own counts.
        num_resamples: of each bootstrap.
        seed: of each bootstrap.
        level: of the confidence intervals.

    Raises:
        UserError: no predictions, two for one query, queries with different steps, or base scores
            of other texts.
    """
    ordered = by_query(predictions)
    if not ordered:
        raise UserError("expected at least one prediction to summarise, found none")
    failures = find_failures(ordered.values())
    failed = {failure.query_id for failure in failures}
    successful = [prediction for key, prediction in ordered.items() if key not in failed]
    base_scores = {**step_zero(base or ()), **step_zero(ordered.values())}
    fallback = [base_scores[key] for key in sorted(failed) if key in base_scores]
    steps = common_steps(successful)
    _check_same_texts(successful, base_scores)
    # One missing base score makes the figure over all queries unknown.
    missing = len(failed) - len(fallback)
    unknown = [Score(math.nan, 0, 0)] if missing else []
    return Summary(
        steps=tuple(
            _summarize_step(
                successful, position, base_scores, [*fallback, *unknown],
                num_resamples=num_resamples, seed=seed, level=level,
            )
            for position in range(len(steps))
        ),
        num_queries=len(ordered),
        num_successful=len(successful),
        failures=failures,
        num_failed_without_base=missing,
        stopped=_stopped(ordered.values()),
        cost=_cost(list(ordered.values())),
    )  # fmt: skip


def read_summary(path: Path) -> Summary:
    """Read what :meth:`Summary.write` wrote; :class:`UserError` where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such summary; run the evaluation first") from None
    return loads(Summary, text, where=str(path))


def by_query(predictions: Iterable[Prediction]) -> dict[str, Prediction]:
    """Predictions by query id, sorted by it; :class:`UserError` where a query has two."""
    found: dict[str, Prediction] = {}
    for prediction in predictions:
        if prediction.query_id in found:
            raise UserError(f"two predictions for the query {prediction.query_id!r}")
        if not prediction.failure and len(prediction.scores) != len(prediction.steps):
            raise UserError(
                f"query {prediction.query_id!r}: {len(prediction.steps)} steps but "
                f"{len(prediction.scores)} scores"
            )
        found[prediction.query_id] = prediction
    return dict(sorted(found.items()))


def find_failures(predictions: Iterable[Prediction]) -> tuple[Failure, ...]:
    """Queries without a finite score at every step."""
    failures = []
    for prediction in predictions:
        reason = prediction.failure
        if not reason:
            bad = [
                step
                for step, score in zip(prediction.steps, prediction.scores, strict=True)
                if not math.isfinite(score.nats)
            ]
            reason = f"the score at step {bad[0]} is not finite" if bad else ""
        if reason:
            failures.append(Failure(prediction.query_id, prediction.subset, reason))
    return tuple(failures)


def step_zero(predictions: Iterable[Prediction]) -> dict[str, Score]:
    """The base model's finite scores, by query id: those of step 0, also of failed queries."""
    return {
        prediction.query_id: prediction.scores[0]
        for prediction in predictions
        if prediction.steps[:1] == (0,)
        and prediction.scores
        and math.isfinite(prediction.scores[0].nats)
    }


def common_steps(predictions: Sequence[Prediction]) -> tuple[int, ...]:
    """The steps that every prediction has; :class:`UserError` where they differ."""
    for prediction in predictions:
        if prediction.steps != predictions[0].steps:
            raise UserError(
                f"query {prediction.query_id!r} was scored at steps {prediction.steps}, "
                f"{predictions[0].query_id!r} at {predictions[0].steps}: not one run"
            )
    return predictions[0].steps if predictions else ()


def _check_same_texts(predictions: Iterable[Prediction], base_scores: Mapping[str, Score]) -> None:
    for prediction in predictions:
        base = base_scores.get(prediction.query_id)
        for score in prediction.scores:
            if base is not None and score.num_bytes != base.num_bytes:
                raise UserError(
                    f"query {prediction.query_id!r} has {score.num_bytes} bytes in this run and "
                    f"{base.num_bytes} in the base's: not the same text"
                )


def _summarize_step(
    successful: Sequence[Prediction],
    position: int,
    base_scores: Mapping[str, Score],
    fallback: Sequence[Score],
    *,
    num_resamples: int,
    seed: int,
    level: float,
) -> StepSummary:
    step = successful[0].steps[position]
    scores = [prediction.scores[position] for prediction in successful]
    subsets = [prediction.subset for prediction in successful]
    names = sorted(set(subsets))
    by_subset = {
        name: add_scores(score for score, subset in zip(scores, subsets, strict=True) if subset == name)
        for name in names
    }  # fmt: skip
    ratios = {name: float(score.bits_per_byte) for name, score in by_subset.items()}
    # A subset of empty texts has no ratio to average.
    is_pile = are_pile_subsets(names) and all(score.num_bytes for score in by_subset.values())

    # Paired only where there is a base score; a run either has them all or none, as a rule.
    paired = [
        i for i, p in enumerate(successful) if p.query_id in base_scores and scores[i].num_bytes
    ]
    before = [base_scores[successful[i].query_id] for i in paired]
    after = [scores[i] for i in paired]
    strata = [subsets[i] for i in paired]

    def compare(keep: str | None, weights: dict[str, float] | None = None) -> PairedBootstrap:
        rows = [j for j, subset in enumerate(strata) if keep is None or subset == keep]
        return paired_bootstrap(
            [before[j] for j in rows], [after[j] for j in rows],
            subsets=[strata[j] for j in rows], weights=weights,
            num_resamples=num_resamples, seed=seed, level=level,
        )  # fmt: skip

    total = add_scores(scores)
    has_pile_base = is_pile and set(strata) == set(names)
    return StepSummary(
        step=step,
        score=total,
        bits_per_byte=float(total.bits_per_byte),
        by_subset=by_subset,
        bits_per_byte_by_subset=ratios,
        pile_all=pile_average(ratios) if is_pile else None,
        against_base=compare(None) if paired else None,
        against_base_by_subset={name: compare(name) for name in names if name in strata},
        pile_all_against_base=compare(None, pile_weights(names)) if has_pile_base else None,
        with_failures=float(add_scores([total, *fallback]).bits_per_byte),
        num_exhausted=sum(prediction.num_steps < step for prediction in successful),
    )


def _stopped(predictions: Iterable[Prediction]) -> dict[str, tuple[str, ...]]:
    stopped: dict[str, tuple[str, ...]] = {}
    for prediction in predictions:
        if prediction.learned is not None and prediction.learned.stopped:
            reason = prediction.learned.stopped
            stopped[reason] = (*stopped.get(reason, ()), prediction.query_id)
    return dict(sorted(stopped.items()))


def _cost(predictions: Sequence[Prediction]) -> Cost:
    stages = sorted({stage for prediction in predictions for stage in prediction.seconds})
    seconds = {
        stage: math.fsum(prediction.seconds.get(stage, 0.0) for prediction in predictions)
        for stage in stages
    }
    return Cost(
        seconds=seconds,
        seconds_per_query={stage: total / len(predictions) for stage, total in seconds.items()},
        tokens_trained=sum(p.learned.num_tokens for p in predictions if p.learned is not None),
        tokens_scored=sum(score.num_tokens for p in predictions for score in p.scores),
        num_excluded_own=sum(prediction.num_excluded_own for prediction in predictions),
        num_excluded_overlap=sum(prediction.num_excluded_overlap for prediction in predictions),
    )
