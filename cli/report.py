"""`ttt-adapt report`: runs as one self-contained page."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import Json, Seed, guarded, print_json, say


@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that `eval` made.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the page and pictures.")],
    title: Annotated[str, typer.Option(help="Of the page.")] = "Test-time training",
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare runs: curves with confidence bands, subsets, examples, cost; HTML and PNG.

    Example: ttt-adapt report runs/mine/nearest runs/mine/sift -o runs/mine/report
    """
    from ttt_adapt.evaluation.report import write_report

    written = write_report(runs, out, title=title, seed=seed or 0)
    print_json({"files": written}) if as_json else say(f"wrote {written[0]}")
