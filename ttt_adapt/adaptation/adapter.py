"""Adapters and their episodes: learn on a query's texts, hand out the model, take it all back."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ttt_adapt.adaptation.chunks import make_curriculum, make_prefix
from ttt_adapt.adaptation.fast_weights import read_in_order, require_fast_weights
from ttt_adapt.adaptation.full import FullWeights
from ttt_adapt.adaptation.learning import QueryLearning
from ttt_adapt.adaptation.lora import LoraWeights
from ttt_adapt.adaptation.optimizer import default_learning_rate, make_optimizer
from ttt_adapt.adaptation.plastic import PlasticWeights
from ttt_adapt.closing import Closing
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.errors import AdaptationError, ModelError, SettingsError
from ttt_adapt.models import LanguageModel
from ttt_adapt.runtime import keep_freed_memory, uses_bfloat16
from ttt_adapt.types import Learned

# By model: the episode that is using it. An episode that no one holds any more uses nothing.
_episodes: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Episode]]" = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True)
class Point:
    """The model as it is after some steps on one query's texts; valid until the next point.

    Attributes:
        query: position of the query in the batch.
        step: as requested.
        step_reached: passages learned from, fewer than ``step`` where the texts end or learning
            was stopped; the state is then that of the last point reached.
        model: to score with, under ``torch.no_grad()``.
        prefix: token ids to read before the text (``in-context`` only), without beginning token.
    """

    query: int
    step: int
    step_reached: int
    model: Any
    prefix: tuple[int, ...] = ()


class Adapter(Closing):
    """Adapts one language model, query by query. Made by :func:`create_adapter`.

    What is expensive (working memory, PEFT's layers) is made once, here; an episode only fills it.
    Also a context manager that closes itself.
    """

    def __init__(self, lm: LanguageModel, settings: AdaptationSettings) -> None:
        self.lm = lm
        if settings.learning_rate is None:
            size = sum(parameter.numel() for parameter in lm.model.parameters())
            rate = default_learning_rate(size)
            settings = settings.model_copy(update={"learning_rate": rate})
        self.settings = settings
        self._closed = False
        self._max_length = _chunk_length(lm, settings)
        self._weights = _make_weights(lm, settings)
        self._lasting: torch.optim.Optimizer | None = None
        if self._weights is not None:
            optimizer = make_optimizer(self._weights.masters, settings)
            self._lasting = optimizer if settings.protocol == "tttlm" else None

    def episode(
        self, texts: Sequence[Sequence[str]], *, steps: Sequence[int], seed: int = 0
    ) -> "Episode":
        """A context in which the model learns on each query's texts; after it, the model is as
        it was, bit for bit, however the context was left.

        Args:
            texts: for each query of the batch, its passages in training order.
            steps: when to hand out the model: numbers of passages learned from, ascending.
            seed: of LoRA's initial weights; each query of the batch starts from the same ones.

        Raises:
            SettingsError: steps that do not ascend from 0 or more.
            AdaptationError: the adapter is closed.
        """
        if not steps or list(steps) != sorted(set(steps)) or steps[0] < 0:
            raise SettingsError(
                f"expected steps that ascend from 0 or more, without repeats, found {list(steps)}"
            )
        if any(isinstance(passages, str) for passages in texts):
            raise SettingsError("expected a sequence of passages for each query, found one string")
        self._require_open()
        return Episode(self, texts, tuple(steps), seed)

    def close(self) -> None:
        """Give the model back for good. Closing twice is allowed, during an episode it is not.

        Raises:
            AdaptationError: an episode is still open.
        """
        active = _active_episode(self.lm.model)
        if active is not None and active.adapter is self:
            raise AdaptationError("expected no open episode on close; leave its context first")
        if self._weights is not None:
            self._weights.close()
        self._weights, self._lasting, self._closed = None, None, True

    def _require_open(self) -> None:
        if self._closed:
            raise AdaptationError("this adapter is closed; create another one")

    def _optimizer(self, weights: PlasticWeights) -> torch.optim.Optimizer:
        return self._lasting or make_optimizer(weights.masters, self.settings)


class Episode:
    """A batch of queries, adapted one after the other. Made by :meth:`Adapter.episode`.

    Attributes:
        learned: for each query how learning went, filled as its points are handed out; ``None``
            before that, and for methods that learn nothing.
    """

    def __init__(
        self, adapter: Adapter, texts: Sequence[Sequence[str]], steps: tuple[int, ...], seed: int
    ) -> None:
        self.adapter = adapter
        self.learned: list[Learned | None] = [None] * len(texts)
        self._texts, self._steps, self._seed = texts, steps, seed
        self._state = "new"

    def __enter__(self) -> Self:
        model = self.adapter.lm.model
        self.adapter._require_open()
        if self._state != "new":
            raise AdaptationError("an episode can be entered once; ask the adapter for another")
        if _active_episode(model) is not None:
            raise AdaptationError(
                f"{self.adapter.lm.name} is in another episode; leave that one first"
            )
        if model.training:
            raise ModelError(
                f"{self.adapter.lm.name}: expected the model in eval mode (no dropout while "
                "learning or scoring), found train mode; call model.eval()"
            )
        _episodes[model] = weakref.ref(self)
        self._state = "open"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._detach()
        finally:
            # Once more, should Ctrl-C have hit the first: nothing happens when all is done.
            self._detach()
            self._state = "over"

    @property
    def is_open(self) -> bool:
        return self._state in ("open", "used")

    def points(self) -> Iterator[Point]:
        """Hand out the model at every requested step of every query, query by query.

        Call it once, within the episode's context.

        Raises:
            AdaptationError: outside of the context, or a second time.
        """
        if self._state != "open":
            found = {"used": "a second call", "over": "the episode is over"}
            raise AdaptationError(
                "expected points() once within `with adapter.episode(...)`, found "
                f"{found.get(self._state, 'the context not entered')}"
            )
        self._state = "used"
        return self._points()

    def _points(self) -> Iterator[Point]:
        for query, texts in enumerate(self._texts):
            method = self.adapter.settings.method
            points = {
                "none": self._unchanged,
                "in-context": self._prefixed,
                "fast-weights": self._reading,
            }.get(method, self._learning)
            for point in points(query, texts):
                yield point
                if not self.is_open:
                    raise AdaptationError("the episode is over; consume its points within it")

    def _unchanged(self, query: int, texts: Sequence[str]) -> Iterator[Point]:
        for step in self._steps:
            yield Point(query, step, 0, self.adapter.lm.model)

    def _prefixed(self, query: int, texts: Sequence[str]) -> Iterator[Point]:
        lm = self.adapter.lm
        for step in self._steps:
            # Half of the window stays for the text itself.
            prefix = make_prefix(lm.tokenizer, texts[:step], max_tokens=lm.max_length // 2)
            yield Point(query, step, min(step, len(texts)), lm.model, prefix)

    def _reading(self, query: int, texts: Sequence[str]) -> Iterator[Point]:
        readings = read_in_order(self.adapter.lm, texts, self._steps, self.adapter.settings)
        for step, reading in zip(self._steps, readings, strict=True):
            self.learned[query] = reading.learned()
            yield Point(query, step, reading.num_passages, reading.model)

    def _learning(self, query: int, texts: Sequence[str]) -> Iterator[Point]:
        adapter, lm, weights = self.adapter, self.adapter.lm, self.adapter._weights
        assert weights is not None
        with torch.inference_mode(False):
            curriculum = make_curriculum(
                lm.tokenizer,
                texts,
                max_length=adapter._max_length,
                epochs=adapter.settings.epochs,
                most=self._steps[-1],
            )
        weights.detach()
        learning: QueryLearning | None = None
        for step in self._steps:
            reached = 0
            if curriculum.num_chunks(step):
                if learning is None:
                    learning = self._begin(weights, curriculum)
                reached = learning.advance(step)
                self.learned[query] = learning.learned()
            else:
                reached = min(step, curriculum.num_passages)
                self.learned[query] = Learned((), 0, "", 0.0)
            yield Point(query, step, reached, lm.model)
        weights.detach()

    def _begin(self, weights: PlasticWeights, curriculum: Any) -> QueryLearning:
        lm, settings = self.adapter.lm, self.adapter.settings
        with torch.inference_mode(False), torch.no_grad():
            weights.attach()
            weights.reset(self._seed)
        return QueryLearning(
            lm.model,
            weights,
            self.adapter._optimizer(weights),
            curriculum,
            settings,
            last_step=self._steps[-1],
            autocast=uses_bfloat16(settings.precision, str(lm.model.device)),
            vocabulary=int(lm.model.get_input_embeddings().weight.shape[0]),
        )

    def _detach(self) -> None:
        if self.adapter._weights is not None:
            self.adapter._weights.detach()


def create_adapter(lm: LanguageModel, settings: AdaptationSettings) -> Adapter:
    """Prepare a model for learning per query.

    The model itself is left as it is until an episode, and is as it was after each.

    Raises:
        SettingsError: settings that do not fit the model (LoRA targets, chunk length).
        ModelError: weights that cannot be learned faithfully (float16, several devices).
    """
    keep_freed_memory()
    return Adapter(lm, settings)


def _make_weights(lm: LanguageModel, settings: AdaptationSettings) -> PlasticWeights | None:
    if settings.method == "full":
        return FullWeights(lm.model, lm.name)
    if settings.method == "lora":
        return LoraWeights(lm.model, settings, lm.name)
    if settings.method == "fast-weights":
        require_fast_weights(lm)
    return None


def _chunk_length(lm: LanguageModel, settings: AdaptationSettings) -> int:
    length = settings.max_length or lm.max_length
    if length > lm.max_length:
        raise SettingsError(
            f"adaptation.max_length must be at most {lm.max_length} for {lm.name}, found {length}"
        )
    return length


def _active_episode(model: nn.Module) -> Episode | None:
    reference = _episodes.get(model)
    episode = reference() if reference is not None else None
    return episode if episode is not None and episode.is_open else None
