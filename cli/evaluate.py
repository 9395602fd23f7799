"""`ttt-adapt eval`: bits per byte over a set of texts, several arms side by side."""

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
    say,
)


@guarded
def evaluate(
    data: Annotated[
        str | None, typer.Argument(help="Texts to score; or `data` in --config.")
    ] = None,
    index: Annotated[Path, typer.Option("--index", "-i", help="The index's folder.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs.")] = Path(
        "runs/eval"
    ),
    arms: Annotated[
        str,
        typer.Option(
            help="Comma-separated: base, in-context[-SELECTOR], or a selector, optionally @λ."
        ),
    ] = "base,random,nearest,sift,in-context",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name, folder or hub id.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="full or lora.")] = None,
    protocol: Annotated[str | None, typer.Option(help="full or split.")] = None,
    per_subset: Annotated[int | None, typer.Option(help="Texts per subset.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Score so many bytes a text.")] = None,
    num_select: Annotated[int | None, typer.Option("--num-select", "-n", help="N.")] = None,
    noise_var: Annotated[float | None, typer.Option(help="λ of SIFT.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of adaptation.")] = None,
    workers: Annotated[
        int, typer.Option(help="Processes of one thread each; 0: one with all threads.")
    ] = 0,
    retry_failures: Annotated[
        bool, typer.Option("--retry-failures", help="Do failed queries again.")
    ] = False,
    config: Config = None,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Bits per byte over a set, per arm and subset, with paired intervals against the base.

    Interrupted, the same command does only what is missing.

    Example: ttt-adapt eval test.jsonl.zst --index my-index -o runs/mine --arms nearest,sift
    """
    from ttt_adapt import pipeline
    from ttt_adapt.cli.tables import print_comparison

    settings = experiment(
        config,
        seed,
        assignments,
        data__path=data,
        model__name=model,
        adaptation__method=adapter,
        adaptation__learning_rate=learning_rate,
        evaluation__protocol=protocol,
        evaluation__per_subset=per_subset,
        evaluation__max_bytes=max_bytes,
        selection__num_select=num_select,
        selection__noise_var=noise_var,
    )
    names = [name.strip() for name in arms.split(",") if name.strip()]
    if dry_run:
        plan = pipeline.plan_evaluation(settings, names)
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    with progress_bar("queries") as update:
        summaries = pipeline.evaluate(
            settings, index, out, arms=names, workers=workers, retry_failures=retry_failures,
            progress=lambda done, total, arm: update(done, total, arm),
        )  # fmt: skip
    if as_json:
        print_json(summaries)
        return
    print_comparison(out, names)
    say(f"draw it: ttt-adapt report {' '.join(str(out / name) for name in names)} -o {out}/report")
