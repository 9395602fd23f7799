"""`ttt-adapt report`: runs as one self-contained page."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import Json, Seed, guarded, print_json, say


@guarded
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders that `eval` made, or one of `curriculum compare`."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for the page and pictures; a comparison's: in its own."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare runs: curves with confidence bands, subsets, examples, cost; HTML and PNG.

    A folder of `curriculum compare` becomes a page of its arms: rates, learning curves, kinds of
    targets, what was practised and forgotten.

    Example: ttt-adapt report runs/mine/nearest runs/mine/sift -o runs/mine/report
    """
    if len(runs) == 1 and (runs[0] / "comparison.json").is_file():
        from ttt_adapt.curriculum.comparing import write_comparison_report

        named = {} if title is None else {"title": title}
        written = write_comparison_report(runs[0], out or runs[0] / "report", **named)
    else:
        from ttt_adapt.errors import UserError
        from ttt_adapt.evaluation.report import write_report

        if out is None:
            raise UserError("expected --out, a folder for the page; found none")
        written = write_report(runs, out, title=title or "Test-time training", seed=seed or 0)
    print_json({"files": written}) if as_json else say(f"wrote {written[0]}")
