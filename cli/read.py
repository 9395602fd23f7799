"""`ttt-adapt read`: let a TTT model read passages, and keep what its fast weights learned."""

from pathlib import Path
from typing import Annotated

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
    progress_bar,
    read_input,
    say,
)


@guarded
def read(
    text: Annotated[str | None, typer.Argument(help="Read what is selected for this text.")] = None,
    index: Annotated[Path, typer.Option("--index", "-i", help="The index's folder.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", "-o", help="The state's file.")] = ...,  # type: ignore[assignment]
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text here.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Read every passage of the index, in its order.")
    ] = False,
    max_passages: Annotated[int | None, typer.Option(help="With --all: at most so many.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model of TTT layers.")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="See ttt-adapt select.")] = None,
    num_select: Annotated[int | None, typer.Option("--num-select", "-n", help="N.")] = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Let a model of TTT layers read passages; predict --state uses what it learned, many times.

    Example: ttt-adapt read --all --index my-index --model ttt-linear-7m -o my.state
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
    )
    if everything and (text is not None or file is not None):
        raise UserError("expected a text or --all, found both; leave one out")
    if max_passages is not None and (max_passages < 1 or not everything):
        raise UserError("--max-passages goes with --all and is at least 1")
    content = None if everything else read_input(text, file)
    if dry_run:
        opened, _ = pipeline.open_index(index)
        num = min(len(opened), max_passages or len(opened))
        num = num if everything else min(settings.selection.num_select, num)
        plan = {"passages": num, "settings": settings.model_dump(mode="json")}
        print_json(plan) if as_json else say(f"would read {num} passages into {out}")
        return
    with progress_bar("reading") as progress:
        found = pipeline.read_state(
            out, index, text=content, settings=settings, max_passages=max_passages,
            progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(found)
        return
    say(
        f"read {found.num_passages:,} passages, {found.num_tokens:,} tokens, in "
        f"{found.elapsed_s:.1f} s; {found.path}: {found.num_bytes / 1e6:.1f} MB, whatever is read"
    )
    if found.stopped:
        say(f"reading ended early: {found.stopped}; the last good state was kept")
