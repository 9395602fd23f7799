"""`ttt-adapt predict`: one text or prompt, before and after adapting to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttt_adapt.cli.console import (
    Assignments,
    Config,
    DryRun,
    Json,
    Seed,
    experiment,
    guarded,
    print_json,
    print_table,
    read_input,
    say,
)

if TYPE_CHECKING:
    from ttt_adapt.config import ExperimentSettings
    from ttt_adapt.types import Prediction, Source


@guarded
def predict(
    text: Annotated[
        str | None, typer.Argument(help="The text; standard input if left out.")
    ] = None,
    index: Annotated[Path | None, typer.Option("--index", "-i", help="The index's folder.")] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Instead of an index: what `ttt-adapt read` kept, for a TTT model."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text here.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name, folder or hub id.")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="See ttt-adapt select.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="full, lora, fast-weights, in-context, none.")
    ] = None,
    num_select: Annotated[int | None, typer.Option("--num-select", "-n", help="N.")] = None,
    noise_var: Annotated[float | None, typer.Option(help="λ of SIFT.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of adaptation.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="full, or split: learn from the first half, score the second."),
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Treat the text as a prompt and continue it.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="With --generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="With --generate; 0 is greedy.")] = 0.0,
    config: Config = None,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Bits per byte of a text before and after adapting to it, and what was learned from.

    Example: ttt-adapt predict --file module.py --index my-index
    """
    from ttt_adapt import pipeline
    from ttt_adapt.errors import UserError

    settings = experiment(
        config,
        seed,
        assignments,
        model__name=model,
        selection__method=selector,
        selection__num_select=num_select,
        selection__noise_var=noise_var,
        adaptation__method=adapter,
        adaptation__learning_rate=learning_rate,
        evaluation__protocol=protocol,
    )
    if (index is None) == (state is None):
        found = "neither" if index is None else "both"
        raise UserError(f"expected --index or --state, found {found}")
    content = read_input(text, file)
    if index is None:
        assert state is not None
        if dry_run:
            held = {"state": str(state), "settings": settings.model_dump(mode="json")}
            print_json(held) if as_json else say(f"would predict from {state}")
            return
        _from_state(content, state, settings, generate, max_new_tokens, temperature, as_json)
        return
    if dry_run:
        picked = pipeline.select(
            content,
            index,
            selection=settings.selection,
            retrieval=settings.retrieval,
            seed=settings.seed,
        )
        num_bytes = sum(len(passage.text.encode()) for passage in picked.passages)
        plan = {
            "passages": len(picked.passages),
            "bytes": num_bytes,
            "settings": settings.model_dump(mode="json"),
        }
        print_json(plan) if as_json else say(
            f"would learn from {len(picked.passages)} passages, {num_bytes:,} bytes"
        )
        return
    if generate:
        continuation = pipeline.continue_prompt(
            content,
            index,
            settings=settings,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        if as_json:
            print_json(continuation)
            return
        _print_continuations(continuation.base, continuation.adapted)
        _print_sources(continuation.sources)
        return
    prediction = pipeline.predict(content, index, settings=settings)
    if as_json:
        print_json({**_scores(prediction), "prediction": prediction})
        return
    _print(prediction)


def _from_state(
    content: str,
    state: Path,
    settings: "ExperimentSettings",
    generate: bool,
    max_new_tokens: int,
    temperature: float,
    as_json: bool,
) -> None:
    from ttt_adapt import pipeline

    if generate:
        base, adapted = pipeline.continue_from_state(
            content,
            state,
            settings=settings,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        if as_json:
            print_json({"prompt": content, "base": base, "adapted": adapted})
        else:
            _print_continuations(base, adapted)
        return
    scores = pipeline.predict_from_state(content, state, settings=settings)
    values = [score.bits_per_byte for score in scores]
    if as_json:
        print_json({"bits_per_byte": values, "scores": scores})
        return
    rows = [
        [name, f"{value:.4f}", f"{value / values[0]:.1%}"]
        for name, value in zip(("base", "after reading"), values, strict=True)
    ]
    print_table("bits per byte", ["model", "bits per byte", "of the base"], rows)


def _print_continuations(base: str, adapted: str) -> None:
    typer.echo(f"--- base model\n{base}\n--- adapted\n{adapted}")


def _scores(prediction: "Prediction") -> dict[str, list[float]]:
    return {"bits_per_byte": [score.bits_per_byte for score in prediction.scores]}


def _print(prediction: "Prediction") -> None:
    from ttt_adapt.errors import AdaptationError

    if prediction.failure:
        raise AdaptationError(prediction.failure)
    base = prediction.scores[0].bits_per_byte
    rows = [
        [str(step), f"{score.bits_per_byte:.4f}", f"{score.bits_per_byte / base:.1%}"]
        for step, score in zip(prediction.steps, prediction.scores, strict=True)
        if step <= prediction.num_steps or step == 0
    ]
    print_table("bits per byte", ["passages learned from", "bits per byte", "of the base"], rows)
    _print_sources(prediction.sources)
    if prediction.learned and prediction.learned.stopped:
        say(f"learning ended early: {prediction.learned.stopped}; the last good state was used")


def _print_sources(sources: "tuple[Source, ...]") -> None:
    rows = [
        [
            source.passage_id,
            f"{source.score:.3f}",
            " ".join(source.text.split())[:60],
        ]
        for source in sources[:10]
    ]
    more = f", first 10 of {len(sources)}" if len(sources) > 10 else ""
    print_table(f"learned from{more}", ["passage", "similarity", "text"], rows)
