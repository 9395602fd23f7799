"""Options and prints that the commands of `ttt-adapt curriculum` share."""

from typing import Annotated, Any

import typer

from ttt_adapt.cli.console import print_json, say

Model = Annotated[str, typer.Option("--model", "-m", help="A bundled name, a folder, a hub id.")]
Targets = Annotated[
    list[str], typer.Option("--targets", "-t", help="Tasks at hand: file or hub:…; repeatable.")
]
MaxTasks = Annotated[int | None, typer.Option(help="Read so many tasks at most.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Weaker = Annotated[
    bool,
    typer.Option(
        "--allow-weaker-sandbox",
        help="Run programs even where this machine cannot isolate them.",
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option("--config", "-c", help="A TOML file, or a recipe: ttc_rl_qwen3_8b_lora, …"),
]


def verifier(weaker: bool) -> Any:
    """A verifier; with ``weaker`` it runs programs without isolation too."""
    from ttt_adapt.curriculum.settings import SandboxSettings
    from ttt_adapt.curriculum.verifying import Verifier

    return Verifier(sandbox=SandboxSettings(allow_weaker=weaker))


def print_plan(values: dict[str, Any], as_json: bool) -> None:
    """What would be done, for ``--dry-run``."""
    print_json(values) if as_json else say(", ".join(f"{k}: {v}" for k, v in values.items()))
