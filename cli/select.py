"""`ttt-adapt select`: what would be learned from for a query, and why."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import (
    Assignments,
    Config,
    Json,
    Seed,
    experiment,
    guarded,
    print_json,
    print_table,
    read_input,
    say,
)


@guarded
def select(
    text: Annotated[
        str | None, typer.Argument(help="The query; standard input if left out.")
    ] = None,
    index: Annotated[Path, typer.Option("--index", "-i", help="The index's folder.")] = ...,  # type: ignore[assignment]
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the query here.")] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            help="sift, sift-fast, nearest, nearest-distinct, uncertainty, mmr or random."
        ),
    ] = None,
    num_select: Annotated[int | None, typer.Option("--num-select", "-n", help="N.")] = None,
    noise_var: Annotated[float | None, typer.Option(help="λ of SIFT.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Stop while σ_n > 1/(αn).")] = None,
    candidates: Annotated[int | None, typer.Option(help="K, candidates per query row.")] = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Show the passages a selector picks for a query, with each pick's gain.

    Example: ttt-adapt select "import json" --index my-index --selector sift -n 10
    """
    from ttt_adapt import pipeline

    settings = experiment(
        config,
        seed,
        assignments,
        selection__method=selector,
        selection__num_select=num_select,
        selection__noise_var=noise_var,
        selection__alpha=alpha,
        retrieval__num_candidates=candidates,
    )
    picked = pipeline.select(
        read_input(text, file),
        index,
        selection=settings.selection,
        retrieval=settings.retrieval,
        seed=settings.seed,
    )
    selection, neighbors = picked.selection, picked.neighbors
    if as_json:
        print_json(
            {
                "method": selection.method,
                "approximate": selection.approximate,
                "prior_var": selection.prior_var,
                "num_candidates": len(neighbors.ids),
                "num_excluded_own": neighbors.num_excluded_own,
                "num_excluded_overlap": neighbors.num_excluded_overlap,
                "sources": picked.sources(),
                "seconds": picked.seconds,
            }
        )
        return
    rows = [
        [
            source.passage_id,
            f"{source.score:.3f}",
            f"{source.gain:.4f}",
            f"{source.posterior_var:.4f}",
            " ".join(source.text.split())[:50],
        ]
        for source in picked.sources()
    ]
    print_table(
        f"{selection.method}, in order of picking",
        ["passage", "similarity", "gain", "variance left", "text"],
        rows,
    )
    say(
        f"{len(rows)} picked of {len(neighbors.ids)} candidates; left out: "
        f"{neighbors.num_excluded_own} of the query's own document, "
        f"{neighbors.num_excluded_overlap} near-duplicates"
    )
