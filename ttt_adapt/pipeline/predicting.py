"""One text: its bits per byte before and after, or a prompt's continuation before and after."""

from dataclasses import dataclass, replace
from pathlib import Path

from ttt_adapt.config import ExperimentSettings
from ttt_adapt.errors import UserError
from ttt_adapt.evaluation import make_query
from ttt_adapt.indexes import Index
from ttt_adapt.models import LanguageModel, generate, load_language_model
from ttt_adapt.pipeline.building import open_index
from ttt_adapt.pipeline.running import Runner, make_plan
from ttt_adapt.pipeline.selecting import Picked, Query, pick, retrieve
from ttt_adapt.types import Document, Embedder, Learned, Prediction, Source


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt's continuation by the base model and by the model adapted to the prompt.

    Attributes:
        base: generated without adaptation.
        adapted: generated after learning on ``sources``.
        sources: what was learned from, in training order.
        learned: how learning went; ``None`` for methods that learn nothing.
    """

    prompt: str
    base: str
    adapted: str
    sources: tuple[Source, ...]
    learned: Learned | None


def predict(
    text: str,
    index: Path | tuple[Index, Embedder],
    *,
    settings: ExperimentSettings | None = None,
    lm: LanguageModel | None = None,
) -> Prediction:
    """Bits per byte of a text before and after adapting to it.

    Args:
        text: UTF-8 encodable; retrieved with and scored as the protocol says.
        index: a folder, or what :func:`ttt_adapt.pipeline.open_index` gave for it.
        settings: model, retrieval, selection, adaptation, scoring, evaluation steps and protocol.
        lm: a loaded model, instead of the one ``settings`` names.

    Raises:
        UserError: the text is empty, or a setting does not fit the model.
        AdaptationError: learning failed; the model is as it was.
    """
    chosen = settings or ExperimentSettings()
    parts = make_query(Document(id="query", text=text), chosen.evaluation)
    picked = _pick(Query(parts.query, whole=parts.whole), index, chosen)
    plan = make_plan(
        picked,
        text=parts.text,
        context=parts.context,
        steps=chosen.evaluation.steps,
        adaptation=chosen.adaptation,
        seed=chosen.seed,
    )
    with Runner(lm or load_language_model(chosen.model), chosen.scoring) as runner:
        return runner.run(plan)


def continue_prompt(
    prompt: str,
    index: Path | tuple[Index, Embedder],
    *,
    settings: ExperimentSettings | None = None,
    lm: LanguageModel | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
) -> Continuation:
    """Continue a prompt with the base model and with the model adapted to it, side by side.

    The adapted model has learned on everything selected; with ``in-context`` it reads it instead.

    Args:
        max_new_tokens: at most so many tokens each.
        temperature: 0 for the likeliest token each time, else sampling, seeded by ``settings.seed``.
    """
    chosen = settings or ExperimentSettings()
    picked = _pick(Query(prompt), index, chosen)
    plan = make_plan(
        picked, text=prompt, steps=(0,), adaptation=chosen.adaptation, seed=chosen.seed
    )
    num_passages = len(plan.texts) * chosen.adaptation.epochs
    plan = replace(plan, steps=(0, num_passages))
    model = lm or load_language_model(chosen.model)
    outputs = []
    with Runner(model, chosen.scoring) as runner, runner.episode(plan) as episode:
        for point in episode.points():
            outputs.append(
                generate(
                    replace(model, model=point.model),
                    prompt,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=chosen.seed,
                    prefix=point.prefix,
                )
            )
        (learned,) = episode.learned
    return Continuation(prompt, outputs[0], outputs[-1], plan.sources, learned)


def _pick(
    query: Query, index: Path | tuple[Index, Embedder], settings: ExperimentSettings
) -> Picked:
    if not query.text.strip():
        raise UserError("expected a text to predict, found an empty one")
    opened = open_index(index) if isinstance(index, Path) else index
    (found,) = retrieve([query], *opened, settings.retrieval)
    return pick(found, opened[0], settings.selection, settings.retrieval, settings.seed)
