"""`ttt-adapt pretrain`: a small language model from scratch."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import (
    Assignments,
    DryRun,
    Json,
    Seed,
    guarded,
    parse_assignments,
    print_json,
    read_config,
    say,
)


@guarded
def pretrain(
    config: Annotated[
        str, typer.Option("--config", "-c", help="A TOML file, or a shipped recipe's name.")
    ] = "pretrain_llama_7m",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the model.")] = ...,  # type: ignore[assignment]
    data_root: Annotated[
        Path, typer.Option(help="Where relative paths of the recipe's sources start.")
    ] = Path(),
    stop_after: Annotated[
        int | None, typer.Option(help="Save and stop after so many outer steps.")
    ] = None,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a language model on a mixture of corpora; interrupted, the same command continues.

    Example: ttt-adapt pretrain -c pretrain_llama_7m --data-root data -o runs/llama-7m
    """
    from ttt_adapt.config import PretrainSettings, override

    changes = parse_assignments(assignments) | ({} if seed is None else {"seed": seed})
    settings = override(read_config(PretrainSettings, config), changes)
    if dry_run:
        from ttt_adapt.training import plan_pretraining

        plan = plan_pretraining(settings, data_root)
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    from ttt_adapt.training import pretrain as run

    result = run(settings, out, data_root=data_root, stop_after=stop_after, report=say)
    if not result.leads:
        return  # of several processes that a launcher started, the first one speaks
    if as_json:
        print_json(result)
    else:
        state = "finished" if result.finished else "stopped, the same command continues"
        say(f"{state}: {result.num_tokens:,} tokens, loss {result.validation_loss_nats:.3f} nats")
