"""Adapt to one query and score it: the part that needs the language model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ttt_adapt.adaptation import (
    Adapter,
    Episode,
    Point,
    create_adapter,
    listing_order,
    training_order,
)
from ttt_adapt.closing import Closing
from ttt_adapt.config import AdaptationSettings, ScoringSettings
from ttt_adapt.errors import AdaptationError, UserError
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import LanguageModel
from ttt_adapt.pipeline.selecting import Picked
from ttt_adapt.runtime import derived_seed
from ttt_adapt.types import Prediction, Score, Source


@dataclass(frozen=True, slots=True)
class Plan:
    """One query, ready to be learned from: what a worker process gets.

    Attributes:
        text: what is scored.
        context: read before ``text`` without being scored (protocol ``split``); may be empty.
        texts: what is learned from, in training order.
        steps: evaluation points, ascending.
        failure: why nothing can be learned, when retrieval already failed; such a query is scored
            by the base model nowhere and counted as failed.
    """

    query_id: str
    subset: str
    text: str
    context: str
    texts: tuple[str, ...]
    sources: tuple[Source, ...]
    steps: tuple[int, ...]
    adaptation: AdaptationSettings
    seed: int
    num_excluded_own: int = 0
    num_excluded_overlap: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def make_plan(
    picked: Picked,
    *,
    text: str,
    context: str = "",
    subset: str = "",
    steps: Sequence[int],
    adaptation: AdaptationSettings,
    seed: int,
) -> Plan:
    """Put a selection into training order; what is only read as a prefix is nearest first."""
    query_id = picked.query.id
    wanted = listing_order(adaptation.method, adaptation.order)
    order = training_order(picked.scores, wanted, derived_seed(seed, query_id, "order"))
    sources = picked.sources([int(position) for position in order])
    return Plan(
        query_id=query_id,
        subset=subset,
        text=text,
        context=context,
        texts=tuple(source.text for source in sources),
        sources=sources,
        steps=tuple(steps),
        adaptation=adaptation,
        seed=derived_seed(seed, query_id, "episode"),
        num_excluded_own=picked.neighbors.num_excluded_own,
        num_excluded_overlap=picked.neighbors.num_excluded_overlap,
        seconds=dict(picked.seconds),
    )


class Runner(Closing):
    """A language model with one adapter at a time; plans go in, predictions come out.

    Used as a context manager: on exit the model is as it was before any adapter touched it.
    """

    def __init__(self, lm: LanguageModel, scoring: ScoringSettings) -> None:
        self.lm = lm
        self.scoring = scoring
        self._adapter: Adapter | None = None
        self._settings: AdaptationSettings | None = None

    def close(self) -> None:
        """Give the model back as it came."""
        if self._adapter is not None:
            self._adapter.close()
            self._adapter = self._settings = None

    def episode(self, plan: Plan) -> Episode:
        """The episode of a plan, over this runner's model; reuses the adapter while it fits."""
        if self._adapter is None or self._settings != plan.adaptation:
            self.close()
            self._adapter = create_adapter(self.lm, plan.adaptation)
            self._settings = plan.adaptation
        return self._adapter.episode([plan.texts], steps=plan.steps, seed=plan.seed)

    def run(self, plan: Plan) -> Prediction:
        """Learn, score at each evaluation point, restore; a failure becomes part of the result."""
        if plan.failure:
            return self._failed(plan, plan.failure)
        try:
            return self._run(plan)
        except UserError:
            raise
        except (AdaptationError, RuntimeError, MemoryError, ArithmeticError) as error:
            return self._failed(plan, f"{type(error).__name__}: {error}".splitlines()[0])

    def _run(self, plan: Plan) -> Prediction:
        scores: list[Score] = []
        reached = -1
        state: tuple[int, tuple[int, ...]] | None = None
        learns = plan.adaptation.method in ("full", "lora", "fast-weights")
        score_s = 0.0
        begun = time.perf_counter()
        with self.episode(plan) as episode:
            for point in episode.points():
                # An unchanged state (no more data, a full prefix) has the score it had.
                here = (point.step_reached if learns else 0, point.prefix)
                if state != here:
                    started = time.perf_counter()
                    score = self.score(point, plan)
                    score_s += time.perf_counter() - started
                    state = here
                scores.append(score)
                reached = max(reached, point.step_reached)
            (learned,) = episode.learned
        # What is neither scoring is learning: optimizer, restoring and all.
        train_s = time.perf_counter() - begun - score_s
        return Prediction(
            query_id=plan.query_id,
            subset=plan.subset,
            steps=plan.steps,
            scores=tuple(scores),
            num_steps=reached,
            learned=learned,
            sources=plan.sources,
            num_excluded_own=plan.num_excluded_own,
            num_excluded_overlap=plan.num_excluded_overlap,
            seconds={**plan.seconds, "train": train_s, "score": score_s},
        )

    def score(self, point: Point, plan: Plan) -> Score:
        """Bits per byte of the plan's text in the state of an evaluation point."""
        result = bits_per_byte(
            point.model,
            self.lm.tokenizer,
            [plan.text],
            max_length=self.scoring.max_length or self.lm.max_length,
            stride=self.scoring.stride,
            batch_size=self.scoring.batch_size,
            prefix=point.prefix,
            contexts=[plan.context] if plan.context else None,
            precision=self.scoring.precision,
        )
        return result.per_text[0]

    def _failed(self, plan: Plan, reason: str) -> Prediction:
        return Prediction(
            query_id=plan.query_id,
            subset=plan.subset,
            steps=plan.steps,
            scores=(),
            num_steps=0,
            learned=None,
            sources=plan.sources,
            num_excluded_own=plan.num_excluded_own,
            num_excluded_overlap=plan.num_excluded_overlap,
            seconds=plan.seconds,
            failure=reason,
        )
