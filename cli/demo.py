"""`ttt-adapt demo`: the whole pipeline over the Python source of this very interpreter."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import DryRun, Json, Seed, guarded, print_json, progress_bar, say


@guarded
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for index, runs, report.")
    ] = Path("runs/demo"),
    workers: Annotated[
        int | None, typer.Option(help="Processes that adapt; default: one a core, at most 4.")
    ] = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Index Python source, hold some modules out, adapt the bundled model to each, compare.

    Example: ttt-adapt demo
    """
    from ttt_adapt.cli.tables import print_comparison, print_examples
    from ttt_adapt.demo import plan_demo, run_demo

    if dry_run:
        plan = plan_demo(seed or 0)
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    with progress_bar("demo") as update:
        result = run_demo(out, seed=seed or 0, workers=workers, report=say, progress=update)
    if as_json:
        print_json(result)
        return
    print_examples(out / "runs", list(result.arms))
    print_comparison(out / "runs", list(result.arms))
    say(f"report: {result.report}   ({result.elapsed_s:.0f} s)")
