"""Read once, predict often: the state of a TTT model's fast weights, kept in a file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ttt_adapt.adaptation import Reading, load_state, save_state
from ttt_adapt.config import ExperimentSettings
from ttt_adapt.errors import AdaptationError, UserError
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.indexes import Index
from ttt_adapt.models import LanguageModel, generate, load_language_model
from ttt_adapt.pipeline.building import open_index
from ttt_adapt.pipeline.running import make_plan
from ttt_adapt.pipeline.selecting import Query, select
from ttt_adapt.types import Embedder, Score

BATCH_PASSAGES = 256


@dataclass(frozen=True, slots=True)
class ReadState:
    """What was read into a state.

    Attributes:
        path: the state's file.
        num_passages: passages read.
        num_tokens: their tokens, beginning tokens included.
        num_bytes: size of the file, the same however much was read.
        elapsed_s: seconds of reading.
        stopped: empty, or why reading ended early (``nan``).
    """

    path: Path
    num_passages: int
    num_tokens: int
    num_bytes: int
    elapsed_s: float
    stopped: str


def read_state(
    path: Path,
    index: Path | tuple[Index, Embedder],
    *,
    text: str | None = None,
    settings: ExperimentSettings | None = None,
    lm: LanguageModel | None = None,
    max_passages: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReadState:
    """Let a TTT model read passages of an index and keep its state.

    Args:
        path: the file to write.
        text: read what the selector picks for it, the nearest last. ``None``: read every passage,
            in the index's order.
        max_passages: without a text: the first so many.
        progress: receives passages read and passages in all.

    Raises:
        ModelError: the model has other layers than TTT.
        AdaptationError: reading ended before its first passage.
    """
    chosen = settings or ExperimentSettings()
    model = lm or load_language_model(chosen.model)
    reading = Reading.by(model, chosen.adaptation)
    opened = open_index(index) if isinstance(index, Path) else index
    if text is None:
        total = min(len(opened[0]), max_passages or len(opened[0]))
        blocks = _all_passages(opened[0], total)
    else:
        nearest_first = _selected(text, opened, chosen)
        total = len(nearest_first)
        blocks = iter([nearest_first[::-1]])
    for block in blocks:
        reading.read(block, progress=lambda done: progress(done, total) if progress else None)
        if reading.stopped:
            break
    if reading.state is None:
        raise AdaptationError("the state was not finite after the first passage; check the model")
    save_state(reading, model, path)
    return ReadState(
        path=path,
        num_passages=reading.num_passages,
        num_tokens=reading.num_tokens,
        num_bytes=path.stat().st_size,
        elapsed_s=reading.elapsed_s,
        stopped=reading.stopped,
    )


def predict_from_state(
    text: str,
    state: Path,
    *,
    settings: ExperimentSettings | None = None,
    lm: LanguageModel | None = None,
) -> tuple[Score, Score]:
    """A text's bits per byte by the model alone, and by the model after it read.

    Raises:
        UserError: the text is empty.
        ModelError: the state is another model's.
    """
    if not text.strip():
        raise UserError("expected a text to predict, found an empty one")
    chosen = settings or ExperimentSettings()
    model = lm or load_language_model(chosen.model)
    base, adapted = (
        bits_per_byte(
            used,
            model.tokenizer,
            [text],
            max_length=chosen.scoring.max_length or model.max_length,
            stride=chosen.scoring.stride,
            batch_size=chosen.scoring.batch_size,
            precision=chosen.scoring.precision,
        ).per_text[0]
        for used in (model.model, load_state(state, model))
    )
    return base, adapted


def continue_from_state(
    prompt: str,
    state: Path,
    *,
    settings: ExperimentSettings | None = None,
    lm: LanguageModel | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
) -> tuple[str, str]:
    """A prompt's continuation by the model alone, and by the model after it read."""
    chosen = settings or ExperimentSettings()
    model = lm or load_language_model(chosen.model)
    base, adapted = (
        generate(
            replace(model, model=used),
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=chosen.seed,
        )
        for used in (model.model, load_state(state, model))
    )
    return base, adapted


def _all_passages(index: Index, total: int) -> Iterator[Sequence[str]]:
    for first in range(0, total, BATCH_PASSAGES):
        ids = list(range(first, min(first + BATCH_PASSAGES, total)))
        yield [passage.text for passage in index.passages(ids)]


def _selected(
    text: str, opened: tuple[Index, Embedder], settings: ExperimentSettings
) -> Sequence[str]:
    picked = select(
        Query(text),
        opened,
        selection=settings.selection,
        retrieval=settings.retrieval,
        seed=settings.seed,
    )
    adaptation = settings.adaptation.model_copy(update={"method": "in-context"})
    return make_plan(picked, text=text, steps=(0,), adaptation=adaptation, seed=settings.seed).texts
