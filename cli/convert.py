"""`ttt-adapt convert`: softmax attention of a pretrained model replaced by test-time training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttt_adapt.cli.console import (
    Assignments,
    Config,
    DryRun,
    Json,
    Seed,
    guarded,
    parse_assignments,
    print_json,
    print_table,
    read_config,
    say,
)

if TYPE_CHECKING:
    from ttt_adapt.pipeline.converting import ConversionReport, Measured


@guarded
def convert(
    model: Annotated[str | None, typer.Argument(help="Name, folder or hub id.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="all, none, 0,3,5-7, every-2, first-4 or last-4."),
    ] = None,
    to: Annotated[str | None, typer.Option(help="ttt-linear or ttt-mlp.")] = None,
    mode: Annotated[str | None, typer.Option(help="pure, gated or distilled.")] = None,
    text: Annotated[
        str | None, typer.Option(help="What perplexity is measured on: a file, folder, hub set.")
    ] = None,
    train: Annotated[
        str | None, typer.Option(help="What distillation learns from: other text.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The converted model's folder.")
    ] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Measure on so much text.")] = None,
    transfer_steps: Annotated[int | None, typer.Option(help="Of attention transfer.")] = None,
    lora_steps: Annotated[int | None, typer.Option(help="Of LoRA.")] = None,
    per_layer: Annotated[
        bool | None, typer.Option("--per-layer/--whole", help="Measure each layer alone, too.")
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Replace attention by fast weights; say what that costs in perplexity, layer by layer.

    Example: ttt-adapt convert llama-7m --layers last-4 --text novel.txt -o runs/converted
    """
    from ttt_adapt.config import override
    from ttt_adapt.conversion_settings import ConvertSettings

    options = {
        "model.name": model,
        "conversion.layers": layers,
        "conversion.to": to,
        "conversion.mode": mode,
        "text.path": text,
        "train.path": train,
        "max_bytes": max_bytes,
        "distillation.transfer_steps": transfer_steps,
        "distillation.lora_steps": lora_steps,
        "per_layer": per_layer,
        "seed": seed,
        "conversion.seed": seed,
    }
    changes: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    settings = override(
        read_config(ConvertSettings, config), changes | parse_assignments(assignments)
    )
    from ttt_adapt.pipeline import converting

    if dry_run:
        plan = converting.plan_conversion(settings)
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    result = converting.convert(settings, out, report=say)
    if as_json:
        print_json(result)
        return
    _print_report(result)


def _print_report(result: "ConversionReport") -> None:
    stages = {
        "before": result.before,
        f"{len(result.layers)} layers converted": result.converted,
        "after attention transfer": result.transferred,
        "after LoRA": result.distilled,
    }
    rows = [_row(name, found, result.before) for name, found in stages.items() if found]
    score = result.before
    print_table(
        f"{result.model}: {result.mode} {result.to}, "
        f"{score.num_tokens:,} tokens, {score.num_bytes:,} bytes",
        ["whole model", "perplexity", "of before", "bits/byte"],
        rows,
    )
    if result.per_layer:
        lines = [
            [
                str(found.layer),
                f"{found.converted.perplexity:.2f}",
                f"{found.transferred.perplexity:.2f}" if found.transferred else "",
                f"{found.error:.3f}" if found.error is not None else "",
                f"{found.error_transferred:.3f}" if found.error_transferred is not None else "",
            ]
            for found in result.per_layer
        ]
        columns = ["layer alone", "perplexity", "transferred", "error", "transferred"]
        learned = result.transferred is not None
        print_table(
            f"one layer converted, the others not (before: {score.perplexity:.2f})",
            columns if learned else columns[:2],
            [line if learned else line[:2] for line in lines],
        )
    if result.distilled:
        say(
            "LoRA has learned the training text too; the same command with --layers none shows "
            "what that alone does"
        )
    if result.folder is not None:
        say(f"saved: {result.folder}; load it by that name")
    else:
        say("nothing was saved; give --out for that")


def _row(name: str, found: "Measured", before: "Measured") -> list[str]:
    return [
        name,
        f"{found.perplexity:.2f}",
        f"{100 * found.perplexity / before.perplexity:.1f}%",
        f"{found.bits_per_byte:.4f}",
    ]
