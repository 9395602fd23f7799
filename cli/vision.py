"""`ttt-adapt vision`: train, evaluate, explain and time vision models."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttt_adapt.cli.console import (
    Assignments,
    DryRun,
    Json,
    Seed,
    guarded,
    parse_assignments,
    parse_numbers,
    print_facts,
    print_json,
    print_table,
    progress_bar,
    read_config,
    say,
)

if TYPE_CHECKING:
    from ttt_adapt.vision.data import ImageDataSettings
    from ttt_adapt.vision.demonstration import DemonstrationResult

app = typer.Typer(
    help="Vision models whose layers learn from each image: MTTT and Vision-TTT.",
    no_args_is_help=True,
)

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataRoot = Annotated[
    Path | None, typer.Option("--data", help="Folder of the images, in the place of the recipe's.")
]


@app.command("train")
@guarded
def train(
    config: Annotated[
        str, typer.Option("--config", "-c", help="A TOML file, or a shipped recipe's name.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the model.")],
    data: DataRoot = None,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    stop_after: Annotated[
        int | None, typer.Option(help="Save and stop after so many outer steps.")
    ] = None,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a vision model; interrupted, the same command continues.

    Example: ttt-adapt vision train -c vision_pair_same -o runs/pair-same
    """
    from ttt_adapt.settings import override
    from ttt_adapt.vision.training import VisionTrainSettings

    changes: dict[str, Any] = {} if data is None else {"data.path": str(data)}
    changes |= parse_assignments(assignments) | ({} if seed is None else {"seed": seed})
    settings = override(read_config(VisionTrainSettings, config), changes)
    if dry_run:
        from ttt_adapt.vision.training import plan_training

        plan = plan_training(settings)
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    from ttt_adapt.vision.training import train as run

    with progress_bar(settings.name) as update:
        result = run(
            settings, out, device=device, stop_after=stop_after, report=say, progress=update
        )
    if os.environ.get("RANK", "0") != "0":
        return  # of several processes that a launcher started, the first one speaks
    if as_json:
        print_json(result)
        return
    state = "finished" if result.finished else "stopped, the same command continues"
    scores = {"": result.validation, ", average of weights": result.average}
    found = [
        f"top-1 {100 * score.top1:.2f} %{name}"
        for name, score in scores.items()
        if score is not None
    ]
    say(f"{state} after {result.num_steps} steps: {'; '.join(found) or 'not validated yet'}")


@app.command("eval")
@guarded
def evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    data: DataRoot = None,
    split: Annotated[
        str | None, typer.Option(help="Which images; default: the validation split.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="A recipe for the data; default: the model's own."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the input; default: the recipe's.")
    ] = None,
    device: Device = "auto",
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Classify every image of a split: top-1, top-5, loss.

    Example: ttt-adapt vision eval runs/pair-same
    """
    from ttt_adapt.errors import ModelError
    from ttt_adapt.runtime import resolve_device
    from ttt_adapt.vision.data import evaluation_batches, open_images
    from ttt_adapt.vision.training import classify, load_model

    place = resolve_device(device)
    loaded: Any = load_model(model)
    settings = _data_settings(model, config, data, image_size, assignments)
    images = open_images(settings, split)
    if len(images.classes) != loaded.num_classes:
        raise ModelError(
            f"{model}: expected images of its {loaded.num_classes} classes, found "
            f"{len(images.classes)} classes; name the data it was trained for with --config or --data"
        )
    batches = evaluation_batches(images, settings, batch_size=batch_size, num_workers=workers)
    with progress_bar("images", len(images)) as update:
        found = classify(loaded.to(place), batches, device=place, progress=update)
    if as_json:
        print_json(found)
        return
    print_facts(
        str(model),
        {
            "images": f"{found.num_images:,}",
            "top-1": f"{100 * found.top1:.2f} %",
            "top-5": f"{100 * found.top5:.2f} %" if loaded.num_classes > 5 else "",
            "loss": f"{found.loss_nats:.4f} nats",
        },
    )


@app.command("explain")
@guarded
def explain(
    model: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")],
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            "-i",
            help="An image file, or china, flower (scikit-learn's), astronaut, chelsea, coffee, "
            "rocket (scikit-image's); repeatable. Default: china and flower.",
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side to look at; default: the model's.")
    ] = None,
    block: Annotated[
        int, typer.Option(help="Whose gradients are drawn: from 0, negative from the last.")
    ] = -1,
    share: Annotated[float, typer.Option(help="Of the patches to mark.")] = 0.3,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Draw a model with fresh weights beside it.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="A recipe for the data; default: the model's own."),
    ] = None,
    assignments: Assignments = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Draw the receptive field, the gradient magnitudes of patches, and the inner loops' losses.

    Example: ttt-adapt vision explain runs/photos -i china -i cat.jpg -o runs/pictures --untrained
    """
    from ttt_adapt.vision.data.samples import named_image
    from ttt_adapt.vision.explaining import explain as run
    from ttt_adapt.vision.training import load_model

    pictures = [named_image(name) for name in image or ["china", "flower"]]
    loaded = load_model(model)
    settings = _data_settings(model, config, None, image_size, assignments)
    found = run(
        loaded,
        pictures,
        settings,
        out,
        block=block,
        share=share,
        compare_untrained=untrained,
        seed=seed or 0,
        report=say,
    )
    fields = {
        name: {"global": field.is_global(), "side_share_of_half": field.side_share(0.5)}
        for name, field in found.receptive_fields.items()
    }
    if as_json:
        print_json({"files": list(found.files), "receptive_fields": fields})
        return
    for name, facts in fields.items():
        say(
            f"{name}: half of the centre's gradient lies within {100 * facts['side_share_of_half']:.0f}"
            f" % of the side; {'every' if facts['global'] else 'not every'} pixel contributes"
        )
    for path in found.files:
        say(str(path))


@app.command("bench")
@guarded
def bench(
    size: Annotated[str, typer.Option(help="tiny, small or base.")] = "tiny",
    resolutions: Annotated[str, typer.Option(help="Sides of square images, in pixels.")] = (
        "224,384,512,768,1024,1280"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 1,
    training: Annotated[
        bool, typer.Option("--training", help="Forward and backward, not the forward alone.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    turns: Annotated[int, typer.Option(min=1, help="At most; the least time counts.")] = 3,
    device: Device = "auto",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Throughput and peak memory over resolutions, next to attention as in DeiT.

    Example: ttt-adapt vision bench --resolutions 224,512
    """
    from ttt_adapt.vision.scaling_settings import bench_plan

    sides = parse_numbers(resolutions)
    plan = bench_plan(size, sides, batch_size, dtype, training=training)
    if dry_run:
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    import torch

    from ttt_adapt.vision.scaling import default_arms, measure, summarise

    arms = default_arms(size)
    with progress_bar("measurements", len(arms) * len(sides)) as update:
        done: list[Any] = []

        def report(row: Any) -> None:
            done.append(row)
            update(len(done))

        rows = measure(
            arms,
            sides,
            batch_size=batch_size,
            mode="training" if training else "inference",
            device=device,
            dtype=getattr(torch, dtype),
            num_turns=turns,
            report=report,
        )
    found = summarise(rows, [arm.label for arm in arms])
    if as_json:
        print_json({"plan": plan, "rows": rows, **found})
        return
    print_table(
        f"{'forward and backward' if training else 'forward'}, batch of {batch_size}, {dtype}",
        ["model", "side", "tokens", "GMACs", "ms", "images/s", "peak MB"],
        [
            [
                row.label,
                str(row.resolution),
                str(row.num_tokens),
                f"{row.gmacs:.2f}",
                f"{1e3 * row.seconds:.1f}",
                f"{row.images_per_s:.2f}",
                f"{row.peak_bytes / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
    for line in found["lines"]:
        say(line)


@app.command("demo")
@guarded
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for models and pictures.")] = (
        Path("runs/vision-demo")
    ),
    parts: Annotated[str, typer.Option(help="Of pair-same, digits, steps, photos.")] = (
        "pair-same,digits,steps,photos"
    ),
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Outer steps of every run; default: the recipes'.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a core, at most 4.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Do tokens that meet through inner loops learn together? Digits, pairs of them, photographs.

    Example: ttt-adapt vision demo --parts pair-same --seeds 0
    """
    from ttt_adapt.vision.demonstration import demonstration_runs

    chosen, numbers = [part.strip() for part in parts.split(",")], parse_numbers(seeds)
    runs = demonstration_runs(chosen, seeds=numbers, num_steps=steps)
    if dry_run:
        total = sum(run.settings.num_steps or 0 for run in runs)
        plan = {"num_runs": len(runs) + ("photos" in chosen), "num_steps": total}
        print_json(plan) if as_json else say(", ".join(f"{k}: {v}" for k, v in plan.items()))
        return
    from ttt_adapt.vision.demonstration import run_demonstration

    with progress_bar("vision demo") as update:
        result = run_demonstration(
            out,
            parts=chosen,
            seeds=numbers,
            num_steps=steps,
            workers=workers,
            report=say,
            progress=update,
        )
    print_json(result.as_json()) if as_json else _print_demonstration(result, numbers)


def _print_demonstration(result: "DemonstrationResult", seeds: list[int]) -> None:
    rows = [
        [
            arm.part,
            arm.arm,
            *(f"{value:.1f}" for value in arm.top1),
            f"{arm.mean:.1f}",
            "" if arm.target is None else f"{arm.target:.0f}",
            " → ".join(f"{loss:.2f}" for loss in arm.inner_losses[-1]) if arm.inner_losses else "",
        ]
        for arm in result.arms
    ]
    columns = ["part", "model", *(f"seed {seed}" for seed in seeds), "mean", "target"]
    title = "Top-1 accuracy, % (inner loss of the last block, before each step and after the last)"
    print_table(title, [*columns, "inner loss"], rows)
    if result.photo_top1 is not None:
        say(f"photos: {result.photo_top1:.1f} % of held-out parts")
    for path in result.pictures:
        say(str(path))
    missed = ", ".join(result.missed)
    say(f"{f'below target: {missed}' if missed else 'targets reached'} ({result.elapsed_s:.0f} s)")


def _data_settings(
    model: Path,
    config: str | None,
    data: Path | None,
    image_size: int | None,
    assignments: list[str] | None,
) -> "ImageDataSettings":
    """How images are read: the recipe's way, or that of the run that left the model."""
    from ttt_adapt.errors import SettingsError
    from ttt_adapt.settings import override
    from ttt_adapt.vision.training import VisionTrainSettings, settings_of

    settings = settings_of(model) if config is None else read_config(VisionTrainSettings, config)
    if settings is None:
        raise SettingsError(
            f"{model}: expected train.toml beside it or above it, found none; name a recipe for its "
            "data with --config"
        )
    changes: dict[str, Any] = {} if data is None else {"data.path": str(data)}
    if image_size is not None:
        changes["data.image_size"] = [image_size, image_size]
    return override(settings, changes | parse_assignments(assignments)).data
