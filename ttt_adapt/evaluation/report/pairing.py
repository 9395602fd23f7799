"""Several runs over the same texts, paired: what the tables and charts of a report show.

Shape legend: Q compared queries, S steps of an arm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.pile import are_pile_subsets, pile_weights
from ttt_adapt.evaluation.report.intervals import Interval, Texts
from ttt_adapt.evaluation.report.runs import QueryResult, Run
from ttt_adapt.types import IntArray

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """An arm after some steps, over the compared queries.

    Attributes:
        bits_per_byte: −Σ ln p / (ln 2 · Σ bytes).
        ratio: of that to the base model's, with its paired bootstrap interval; ``None`` when the
            base model's scores are unknown.
        wins, losses: queries that need fewer, or more, bits than with the base model.
    """

    step: int
    bits_per_byte: float
    ratio: Interval | None
    wins: int
    losses: int


@dataclass(frozen=True, slots=True)
class Arm:
    """A run within a report.

    Attributes:
        nats_QS: float64, at the queries compared and the steps all of them have.
        base_Q: float64, the base model's nats; ``None`` when no run has them.
        is_base: every score equals the base model's: the arm learns nothing.
        num_failed, num_not_finite, num_stopped: among all of the run's queries.
    """

    run: Run
    steps: tuple[int, ...]
    nats_QS: Float
    base_Q: Float | None
    is_base: bool
    points: tuple[Point, ...]
    num_failed: int
    num_not_finite: int
    num_stopped: int

    @property
    def label(self) -> str:
        return self.run.label

    @property
    def last(self) -> Point | None:
        """The arm after all its steps; ``None`` when nothing was compared."""
        return self.points[-1] if self.points else None

    @property
    def reductions_Q(self) -> Float | None:
        """Per query, the share of the base model's bits saved after all steps."""
        if self.base_Q is None or not self.steps:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            reductions: Float = 1.0 - self.nats_QS[:, -1] / self.base_Q
        return reductions


@dataclass(frozen=True, slots=True)
class Pairing:
    """What can be said about several runs together.

    Attributes:
        arms: in the order of the runs.
        query_ids: compared: in every run, and scored with finite numbers by every run that
            scored anything.
        texts: the same, as bytes and subsets, and how they are resampled.
        num_shared: queries present in every run, whether scored or not.
        num_union: queries present in any run.
        notes: what a reader must know before believing the numbers.
    """

    arms: tuple[Arm, ...]
    query_ids: tuple[str, ...]
    texts: Texts
    num_shared: int
    num_union: int
    notes: tuple[str, ...]

    @property
    def ranked(self) -> list[Arm]:
        """Arms that adapt and have a ratio to base, best first (ties: order of the runs)."""
        found = []
        for place, arm in enumerate(self.arms):
            ratio = arm.last.ratio if arm.last else None
            if ratio is not None and math.isfinite(ratio.value) and not arm.is_base:
                found.append((ratio.value, place, arm))
        return [arm for _, _, arm in sorted(found, key=lambda entry: entry[:2])]

    @property
    def same_model(self) -> bool:
        return len({arm.run.model_key for arm in self.arms}) == 1

    def ratio(self, arm: Arm, rows: IntArray | None = None) -> Interval | None:
        """An arm's final ratio to base, over all compared queries or those at ``rows``."""
        if arm.base_Q is None or not arm.steps:
            return None
        return self.texts.ratio(arm.nats_QS[:, -1], arm.base_Q, rows=rows)

    @property
    def pile_weights(self) -> dict[str, float] | None:
        """Weights of ``pile_all``, where every subset is one of the Pile's."""
        names = sorted(set(self.subsets))
        if not are_pile_subsets(names):
            return None
        try:
            return pile_weights(names)
        except UserError:  # two spellings of one subset
            return None

    def pile_all(self, arm: Arm) -> Interval | None:
        """An arm's final ratio to base of ``pile_all``; ``None`` where there is none."""
        weights = self.pile_weights
        if weights is None or arm.base_Q is None or not arm.steps:
            return None
        return self.texts.ratio(arm.nats_QS[:, -1], arm.base_Q, weights=weights)

    @property
    def subsets(self) -> tuple[str, ...]:
        """The subset of each compared query."""
        return self.texts.subsets

    def rows_of(self, subset: str) -> IntArray:
        """Positions of a subset's queries among those compared."""
        return np.flatnonzero(np.array([name == subset for name in self.subsets])).astype(np.int64)


def pair_runs(runs: Sequence[Run], *, num_resamples: int = 2000, seed: int = 0) -> Pairing:
    """Pair runs over the queries they share.

    Raises:
        UserError: no query is in every run, or a query has another number of bytes in another
            run (the runs scored different texts).
    """
    # Sorted, as in a run's own summary: the bootstrap's draws depend on the order.
    shared = sorted(key for key in runs[0].results if all(key in run.results for run in runs[1:]))
    if not shared:
        counts = ", ".join(f"{run.label}: {len(run.results)}" for run in runs)
        raise UserError(
            f"these runs have no query in common ({counts}); expected runs over the same texts: "
            "evaluate each arm on the same data"
        )
    _require_same_texts(runs, shared)
    # A run that scored nothing at all is shown as failed; it must not empty the pairing.
    scoring = [run for run in runs if any(_is_scored(run.results[key]) for key in shared)]
    compared = [key for key in shared if all(_is_scored(run.results[key]) for run in scoring)]
    if not scoring:
        compared = []
    first = [scoring[0].results[key] for key in compared]
    texts = Texts(
        num_bytes_Q=np.array([result.num_bytes for result in first], dtype=np.int64),
        subsets=tuple(result.subset or "(none)" for result in first),
        num_resamples=num_resamples,
        seed=seed,
    )
    tables = {run.label: _table(run, compared) for run in runs if run in scoring}
    arms = tuple(_make_arm(run, runs, tables, texts) for run in runs)
    union = {key for run in runs for key in run.results}
    return Pairing(
        arms=arms,
        query_ids=tuple(compared),
        texts=texts,
        num_shared=len(shared),
        num_union=len(union),
        notes=tuple(_notes(arms, runs)),
    )


def _is_scored(result: QueryResult) -> bool:
    return (
        not result.failure
        and result.num_bytes > 0
        and bool(result.nats)
        and all(math.isfinite(nats) for nats in result.nats)
    )


def _require_same_texts(runs: Sequence[Run], shared: Sequence[str]) -> None:
    for key in shared:
        sizes = [(run, run.results[key].num_bytes) for run in runs if run.results[key].num_bytes]
        for run, size in sizes[1:]:
            first, expected = sizes[0]
            if size != expected:
                raise UserError(
                    f"query {key!r} has {expected} bytes in {first.label} and {size} in "
                    f"{run.label}: these runs scored different texts; expected the same data, "
                    "protocol and max_bytes in all"
                )


def _table(run: Run, compared: Sequence[str]) -> tuple[tuple[int, ...], Float]:
    """Steps that all compared queries have, and the nats there."""
    if not compared:
        return (), np.zeros((0, 0))
    results = [run.results[key] for key in compared]
    common = set(results[0].steps).intersection(*(result.steps for result in results[1:]))
    steps = tuple(sorted(common))
    rows = [[result.nats[result.steps.index(step)] for step in steps] for result in results]
    return steps, np.array(rows, dtype=np.float64).reshape(len(results), len(steps))


def _make_arm(
    run: Run,
    runs: Sequence[Run],
    tables: dict[str, tuple[tuple[int, ...], Float]],
    texts: Texts,
) -> Arm:
    steps, nats = tables.get(run.label, ((), np.zeros((len(texts.subsets), 0))))
    base = _base(run, runs, tables)
    points = []
    for column, step in enumerate(steps):
        values = nats[:, column]
        points.append(
            Point(
                step=step,
                bits_per_byte=texts.bits_per_byte(values),
                ratio=None if base is None else texts.ratio(values, base),
                wins=0 if base is None else int((values < base).sum()),
                losses=0 if base is None else int((values > base).sum()),
            )
        )
    is_base = base is not None and bool(steps) and bool((nats == base[:, None]).all())
    results = run.results.values()
    return Arm(
        run=run,
        steps=steps,
        nats_QS=nats,
        base_Q=base,
        is_base=is_base,
        points=tuple(points),
        num_failed=sum(bool(result.failure) for result in results),
        num_not_finite=sum(not result.failure and not _is_scored(result) for result in results),
        num_stopped=sum(bool(result.stopped) for result in results),
    )


def _base(
    run: Run, runs: Sequence[Run], tables: dict[str, tuple[tuple[int, ...], Float]]
) -> Float | None:
    """The run's own scores at step 0, or those of another run with the same model."""
    same = [other for other in runs if other is not run and other.model_key == run.model_key]
    for other in (run, *same):
        steps, nats = tables.get(other.label, ((), np.zeros((0, 0))))
        if steps and steps[0] == 0:
            base: Float = nats[:, 0]
            return base
    return None


def _notes(arms: Sequence[Arm], runs: Sequence[Run]) -> list[str]:
    notes = []
    models = {run.model_key: run.model or "unnamed model" for run in runs}
    if len(models) > 1:
        notes.append(
            f"The arms use {len(models)} different models ({', '.join(models.values())}); each is "
            "compared with its own base."
        )
    protocols = sorted({run.protocol for run in runs if run.protocol})
    if len(protocols) > 1:
        notes.append(f"The arms use different protocols: {', '.join(protocols)}.")
    indexes = {str(run.info["index"]) for run in runs if run.info.get("index")}
    if len(indexes) > 1:
        notes.append("The arms retrieved from different indexes.")
    for key in {arm.run.model_key for arm in arms}:
        bases = [
            (arm.label, arm.nats_QS[:, 0])
            for arm in arms
            if arm.run.model_key == key and arm.steps[:1] == (0,)
        ]
        for label, base in bases[1:]:
            if not np.allclose(base, bases[0][1], rtol=1e-5, atol=1e-6):
                notes.append(
                    f"The base model's own scores differ between {bases[0][0]} and {label}, "
                    "although the model is the same: check versions, precision and threads."
                )
    unknown = [arm.label for arm in arms if arm.points and arm.base_Q is None]
    if unknown:
        notes.append(f"No base scores (step 0) for {', '.join(unknown)}: no ratio is shown.")
    nothing = [arm.label for arm in arms if not arm.points and arm.nats_QS.shape[0]]
    if nothing:
        notes.append(f"Nothing was scored in {', '.join(nothing)}; the others are compared.")
    return notes
