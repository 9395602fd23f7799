"""Several runs over the same queries, side by side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.bootstrap import PairedBootstrap, paired_bootstrap
from ttt_adapt.evaluation.scores import add_scores
from ttt_adapt.evaluation.summary import by_query, common_steps, find_failures
from ttt_adapt.types import Prediction, Score


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One run at one step, over the shared queries.

    Attributes:
        run: its name.
        step: training steps asked for.
        bits_per_byte: corpus-level.
        against_base: compared with the run's own step 0; ``None`` where it has none.
        against_baseline: compared with the baseline run; ``None`` for the baseline itself.
        baseline_step: the baseline's step it was compared at: the last one not beyond ``step``,
            so that a baseline that never adapts is compared at its only step. ``None`` where the
            baseline has no such step.
    """

    run: str
    step: int
    bits_per_byte: float
    against_base: PairedBootstrap | None
    against_baseline: PairedBootstrap | None
    baseline_step: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs on the queries that all of them scored.

    Attributes:
        rows: run by run in the order given, steps ascending.
        baseline: the name of the baseline run.
        num_shared: queries that every run scored; ``rows`` is about these alone.
        num_queries: queries of each run, failed ones included.
        num_failed: failed queries of each run.
    """

    rows: tuple[ComparisonRow, ...]
    baseline: str
    num_shared: int
    num_queries: Mapping[str, int]
    num_failed: Mapping[str, int]


def compare(
    runs: Mapping[str, Iterable[Prediction]],
    *,
    baseline: str,
    num_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Comparison:
    """Compare runs, paired by query, over the queries that succeeded in all of them.

    A query that fails in one run leaves the comparison in all; the counts say how many. (Each
    run's own summary has the figure that keeps them.)

    Args:
        runs: predictions by name of the run.
        baseline: the name of the run that the others are compared with.
        num_resamples: of each bootstrap, stratified by subset.
        seed: of each bootstrap.
        level: of the confidence intervals.

    Raises:
        UserError: the baseline is not among the runs, no query is shared, or a query's text
            differs between runs.
    """
    if baseline not in runs:
        raise UserError(f"no run is named {baseline!r}; the runs are {', '.join(runs) or 'none'}")
    predictions = {name: by_query(run) for name, run in runs.items()}
    failed = {
        name: {failure.query_id for failure in find_failures(run.values())}
        for name, run in predictions.items()
    }
    shared = sorted(
        set.intersection(*(set(run) - failed[name] for name, run in predictions.items()))
    )
    if not shared:
        counts = ", ".join(
            f"{name}: {len(run) - len(failed[name])}" for name, run in predictions.items()
        )
        raise UserError(f"no query succeeded in all runs (successful queries: {counts})")  # fmt: skip
    columns = {
        name: _scores_by_step([run[query_id] for query_id in shared])
        for name, run in predictions.items()
    }
    subsets = [predictions[baseline][query_id].subset for query_id in shared]
    _check_same_texts(columns, baseline, shared)

    def bootstrap(one: list[Score], two: list[Score]) -> PairedBootstrap:
        return paired_bootstrap(
            one, two, subsets=subsets, num_resamples=num_resamples, seed=seed, level=level
        )

    rows = []
    for name, by_step in columns.items():
        for step, scores in by_step.items():
            reachable = [] if name == baseline else [at for at in columns[baseline] if at <= step]
            at = max(reachable, default=None)
            rows.append(
                ComparisonRow(
                    run=name,
                    step=step,
                    bits_per_byte=float(add_scores(scores).bits_per_byte),
                    against_base=bootstrap(by_step[0], scores) if 0 in by_step else None,
                    against_baseline=(
                        None if at is None else bootstrap(columns[baseline][at], scores)
                    ),
                    baseline_step=at,
                )
            )
    return Comparison(
        rows=tuple(rows),
        baseline=baseline,
        num_shared=len(shared),
        num_queries={name: len(run) for name, run in predictions.items()},
        num_failed={name: len(ids) for name, ids in failed.items()},
    )


def _scores_by_step(predictions: list[Prediction]) -> dict[int, list[Score]]:
    return {
        step: [prediction.scores[position] for prediction in predictions]
        for position, step in enumerate(common_steps(predictions))
    }


def _check_same_texts(
    columns: Mapping[str, Mapping[int, list[Score]]], baseline: str, shared: list[str]
) -> None:
    expected = next(iter(columns[baseline].values()))
    for name, by_step in columns.items():
        for scores in by_step.values():
            for query_id, one, two in zip(shared, expected, scores, strict=True):
                if one.num_bytes != two.num_bytes:
                    raise UserError(
                        f"query {query_id!r} has {one.num_bytes} bytes in {baseline!r} and "
                        f"{two.num_bytes} in {name!r}: the runs scored different texts"
                    )
