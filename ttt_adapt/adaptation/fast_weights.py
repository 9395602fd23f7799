"""Reading as adaptation: the fast weights of TTT layers after the selected passages.

The model reads the passages one after the other; what its TTT layers have learned from them is the
adaptation, and every text is predicted from that state. Nothing is changed in the model itself.
Cost per token and memory do not grow with the amount read. The state can be kept in a file and
used for any number of queries.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from ttt_adapt.config import AdaptationSettings
from ttt_adapt.errors import AdaptationError, ModelError
from ttt_adapt.layers import TTTLayer
from ttt_adapt.models import LanguageModel, beginning_token
from ttt_adapt.runtime import uses_bfloat16
from ttt_adapt.types import Learned

BLOCK_TOKENS = 1024
"""Tokens per forward pass while reading, of one passage or several: bounds the memory of activations."""


class ReadingModel:
    """A model that begins every sequence with what it has read: answers the calls of the model.

    A call without a cache starts from a copy of the state; one with a cache goes on from that.
    Everything else (parameters, configuration, modes) is the model's own.
    """

    def __init__(self, model: Any, state: Any) -> None:
        self._model, self._state = model, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *, input_ids: torch.Tensor, **options: Any) -> Any:
        if options.get("past_key_values") is None:
            state = self._state.clone()
            state.batch_repeat_interleave(input_ids.shape[0])
            options["past_key_values"] = state
        return self._model(input_ids=input_ids, **{**options, "use_cache": True})


class Reading:
    """One sequence being read: the state so far, and how reading went.

    Args:
        half_life: tokens after which fast weights keep half of what they learned, W0 + (W - W0) / 2;
            0: they forget nothing of themselves, which is the operator as it is trained.
        autocast: read with bfloat16 autocast; the fast weights themselves learn in float32 in any case.
    """

    def __init__(self, lm: LanguageModel, *, half_life: int = 0, autocast: bool = False) -> None:
        require_fast_weights(lm)
        self._lm, self._half_life, self._autocast = lm, half_life, autocast
        self._state: Any = None
        self.num_tokens = 0
        self.num_passages = 0
        self.stopped = ""
        self.elapsed_s = 0.0

    @classmethod
    def by(cls, lm: LanguageModel, settings: AdaptationSettings) -> Self:
        """A reading with the half-life and precision of settings."""
        autocast = uses_bfloat16(settings.precision, str(lm.model.device))
        return cls(lm, half_life=settings.half_life, autocast=autocast)

    @property
    def model(self) -> Any:
        """To predict with: the model itself before anything is read."""
        if self._state is None:
            return self._lm.model
        return ReadingModel(self._lm.model, self._state)

    @property
    def state(self) -> Any:
        """The cache after what was read; ``None`` before. It is not to be changed."""
        return self._state

    def read(self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None) -> None:
        """Read passages, each after the beginning token, as in pretraining.

        A passage after which the state is not finite ends the reading; the state before it stays.

        Args:
            progress: receives ``num_passages`` now and then.
        """
        begun = time.perf_counter()
        for passages in _blocks(map(self._tokens, texts)):
            if self.stopped:
                break
            self._take(passages)
            if progress is not None:
                progress(self.num_passages)
        self.elapsed_s += time.perf_counter() - begun

    def _tokens(self, text: str) -> list[int]:
        ids = self._lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [beginning_token(self._lm.tokenizer), *ids]

    def _take(self, passages: list[list[int]]) -> None:
        state = self._read_tokens(list(itertools.chain(*passages)))
        if state.is_finite():
            self._state = state
            self.num_tokens += sum(map(len, passages))
            self.num_passages += len(passages)
        elif len(passages) == 1:
            self.stopped = "nan"
        else:  # again, up to the one that did it
            for passage in passages:
                if not self.stopped:
                    self._take([passage])

    @torch.no_grad()
    def _read_tokens(self, ids: list[int]) -> Any:
        model = self._lm.model
        state = None if self._state is None else self._state.clone()
        for first in range(0, len(ids), BLOCK_TOKENS):
            tokens = torch.tensor([ids[first : first + BLOCK_TOKENS]], device=model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=self._autocast):
                state = model(
                    input_ids=tokens, past_key_values=state, use_cache=True, logits_to_keep=1
                ).past_key_values
            if self._half_life:
                forget(state, model, 0.5 ** (tokens.shape[1] / self._half_life))
        return state

    def learned(self) -> Learned:
        return Learned((), self.num_tokens, self.stopped, self.elapsed_s)


def forget(state: Any, model: Any, share: float) -> None:
    """Move fast weights towards the initial ones, in place: ``W <- W0 + share (W - W0)``.

    What is weight decay in an ordinary optimizer; as a gate it is in Titans and gated delta rules. Models
    read on with it beyond the lengths they were trained on. Tokens of an open mini-batch stay as they are.

    Args:
        state: a :class:`~ttt_adapt.models.ttt.cache.TTTCache` of ``model``.
        share: in [0, 1].
    """
    layers = (layer for layer in model.modules() if isinstance(layer, TTTLayer))
    for block, layer in zip(state.states, layers, strict=True):
        initial = layer.initial_weights().values()
        for weight, begun in zip(block.mixer.fast.weights, initial, strict=True):
            weight.lerp_(begun.to(weight.dtype), 1.0 - share)


def _blocks(passages: Iterable[list[int]]) -> Iterator[list[list[int]]]:
    """As many whole passages at a time as a forward pass takes; at least one."""
    block: list[list[int]] = []
    for passage in passages:
        if block and sum(map(len, block)) + len(passage) > BLOCK_TOKENS:
            yield block
            block = []
        block.append(passage)
    if block:
        yield block


def read_in_order(
    lm: LanguageModel, texts: Sequence[str], steps: Sequence[int], settings: AdaptationSettings
) -> Iterator[Reading]:
    """A reading for each step: of the first ``step`` texts, in their order or the reverse.

    Args:
        texts: passages in the order of ``settings``; nearest first where it is farthest first, the
            default: each step's passages are then read from the last to the first, every step anew.
            Otherwise a step goes on from the one before it.
        steps: numbers of passages, ascending.
    """
    passages = list(texts) * settings.epochs
    reading = Reading.by(lm, settings)
    for step in steps:
        if settings.order in (None, "farthest-first"):
            reading = Reading.by(lm, settings)
            reading.read(passages[:step][::-1])
        else:
            reading.read(passages[reading.num_passages : step])
        yield reading


def require_fast_weights(lm: LanguageModel) -> None:
    """Refuse a model whose state would grow with what it reads, or forget it.

    Raises:
        ModelError: a layer mixes tokens by something else than TTT.
    """
    kinds = getattr(lm.model.config, "layer_types", None) or ["attention"]
    others = sorted({kind for kind in kinds if not kind.startswith("ttt_")})
    if others:
        raise ModelError(
            f"{lm.name}: expected a model whose layers are all TTT, to read at constant memory, "
            f"found {', '.join(others)}; use a TTT model, or the adapter full, lora or in-context"
        )


def save_state(reading: Reading, lm: LanguageModel, path: Path) -> None:
    """Keep what was read: a safetensors file that names the model it belongs to.

    Raises:
        AdaptationError: nothing was read.
    """
    if reading.state is None:
        raise AdaptationError("expected a state to save, but nothing was read; give it passages")
    reading.state.save(path, fingerprint=lm.fingerprint)


def load_state(path: Path, lm: LanguageModel) -> ReadingModel:
    """The model as it was after reading, to predict any number of texts with.

    Raises:
        ModelError: no such file, or another model's state.
    """
    from ttt_adapt.models.ttt.cache import TTTCache

    require_fast_weights(lm)
    state = TTTCache.load(
        path, fingerprint=lm.fingerprint, config=lm.model.config, device=lm.model.device
    )
    return ReadingModel(lm.model, state)
