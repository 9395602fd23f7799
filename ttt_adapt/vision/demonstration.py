"""A learning check that fits on two cores: do tokens that meet through inner loops learn together?

Parts:

- ``pair-same``: two digits side by side, the same one twice? The model without mixing scores chance, so
  whatever is above comes from the mixers. Three seeds each.
- ``digits``: the digits themselves.
- ``steps``: MTTT-MLP with T = 0 … 4 full-batch inner steps on pair-same: accuracy, and the inner loss
  before each step and after the last (figure 1 of MTTT).
- ``photos``: a model of real images, and pictures of what is inside it.

Every run is one call of :func:`ttt_adapt.vision.training.train` with a shipped recipe, in a process of
its own with one thread; started again, finished runs are kept.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttt_adapt.configs import config_path
from ttt_adapt.errors import SettingsError
from ttt_adapt.runtime import num_cpus
from ttt_adapt.settings import load_settings, make_settings, override
from ttt_adapt.storage import write_json
from ttt_adapt.vision.training.settings import VisionTrainSettings

PARTS = ("pair-same", "digits", "steps", "photos")
SEEDS = (0, 1, 2)
INNER_STEPS = (0, 1, 2, 3, 4)
STUDY_STEPS = 500
RECORDED_IMAGES = 256
RESULT_FILE = "demonstration.json"

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "no mixing": ("vit_tiny_attention", {"mixer": "none", "pre_logits": False}),
    "attention": ("vit_tiny_attention", {"pre_logits": False}),
    "MTTT-Linear": ("vit_tiny_mttt_linear", {"pre_logits": False}),
    "MTTT-MLP": ("vit_tiny_mttt_mlp", {"pre_logits": False}),
    "Vision-TTT": ("vision_ttt_tiny", {"mini_batch_size": 4, "dwconv": False}),
}
"""Name, registered model, and what its recipe's overrides get on top. The classifier is linear in the
mean of the tokens: a layer between (``pre_logits``) would let both halves meet there, and with it a
model without mixing answers three pairs in four."""
TARGETS = {
    "pair-same": {"MTTT-Linear": 80.0, "MTTT-MLP": 88.0, "Vision-TTT": 93.0},
    "digits": {"MTTT-Linear": 93.0, "MTTT-MLP": 93.0, "Vision-TTT": 93.0},
}
"""Percent, of the mean over seeds."""
SHARED = ("dim", "depth", "num_heads", "patch_size")
"""Overrides of the recipe that every arm has."""


@dataclass(frozen=True)
class Run:
    """One training run to do: what it is of, and its settings."""

    part: str
    arm: str
    seed: int
    settings: VisionTrainSettings

    @property
    def folder(self) -> str:
        name = self.arm.lower().replace(" ", "-").replace("=", "")
        return f"{self.part}/{name}-seed-{self.seed}"


@dataclass(frozen=True)
class ArmResult:
    """Accuracy of one model over seeds.

    Attributes:
        top1: percent, in the order of the seeds.
        target: percent that the mean should reach; ``None``: none is set.
        inner_losses: of the part ``steps``: mean over seeds and images, ``[layer][step 0 … T]``.
        elapsed_s: mean seconds of training.
    """

    part: str
    arm: str
    seeds: tuple[int, ...]
    top1: tuple[float, ...]
    target: float | None
    elapsed_s: float
    inner_losses: tuple[tuple[float, ...], ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.top1)

    @property
    def is_reached(self) -> bool:
        return self.target is None or self.mean >= self.target


@dataclass(frozen=True)
class DemonstrationResult:
    """What the demonstration found.

    Attributes:
        arms: in the order of parts and models.
        pictures: of the parts ``steps`` and ``photos``.
    """

    arms: tuple[ArmResult, ...]
    pictures: tuple[Path, ...] = ()
    photo_top1: float | None = None
    elapsed_s: float = 0.0
    missed: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Values for ``demonstration.json`` and ``--json``."""
        found = asdict(self)
        for row, arm in zip(found["arms"], self.arms, strict=True):
            row |= {"mean": arm.mean, "is_reached": arm.is_reached}
        found["pictures"] = [path.name for path in self.pictures]
        return found


def demonstration_runs(
    parts: Sequence[str] = PARTS, *, seeds: Sequence[int] = SEEDS, num_steps: int | None = None
) -> list[Run]:
    """The runs of some parts, without ``photos``; the longest first, so that no core waits at the end.

    Args:
        num_steps: in the place of the recipes', for a quick look.

    Raises:
        SettingsError: unknown parts, or no seeds.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts or not seeds:
        raise SettingsError(
            f"expected parts of {', '.join(PARTS)} and at least one seed, found parts "
            f"{', '.join(parts) or 'none'} and {len(seeds)} seeds"
        )
    runs = []
    for seed in seeds:
        if "steps" in parts:
            for count in sorted(INNER_STEPS, reverse=True):
                changes = {"num_steps": num_steps or STUDY_STEPS, "seed": seed}
                changes["record_inner_losses"] = RECORDED_IMAGES
                settings = _settings("pair_same", "MTTT-MLP", {"steps": count}, changes)
                runs.append(Run("steps", f"T = {count}", seed, settings))
        for part, recipe in (("pair-same", "pair_same"), ("digits", "digits")):
            if part in parts:
                changes = {"seed": seed} | ({"num_steps": num_steps} if num_steps else {})
                for arm in reversed(ARMS):
                    runs.append(Run(part, arm, seed, _settings(recipe, arm, {}, changes)))
    return runs


def run_demonstration(
    out: Path,
    *,
    parts: Sequence[str] = PARTS,
    seeds: Sequence[int] = SEEDS,
    num_steps: int | None = None,
    workers: int | None = None,
    report: Callable[[str], None] = print,
    progress: Callable[[int, int | None, str | None], None] | None = None,
) -> DemonstrationResult:
    """Train every model of the parts, draw, and write ``demonstration.json`` into ``out``.

    Args:
        workers: processes at a time; ``None``: one a core, at most 4.

    Raises:
        SettingsError: unknown parts, or no seeds.
    """
    started = time.monotonic()
    runs = demonstration_runs(parts, seeds=seeds, num_steps=num_steps)
    with_photos = "photos" in parts
    total = len(runs) + with_photos
    found: dict[str, dict[str, Any]] = {}
    # Spawned: a forked torch hangs.
    context = multiprocessing.get_context("spawn")
    size = min(max(1, total), workers or min(4, num_cpus()))
    pictures: list[Path] = []
    with ProcessPoolExecutor(size, mp_context=context, initializer=_one_thread) as pool:
        waiting: dict[Any, Run | None] = {}
        if with_photos:
            waiting[pool.submit(_learn_photos, out / "photos", num_steps)] = None
        for run in runs:
            values = run.settings.model_dump(mode="json")
            waiting[pool.submit(_train, values, out / run.folder)] = run
        try:
            for done, future in enumerate(as_completed(waiting), start=1):
                run_done = waiting[future]
                name = "photos" if run_done is None else run_done.folder
                found[name] = future.result()
                report(f"{name}: {100 * found[name]['top1']:.1f} %")
                if progress is not None:
                    progress(done, total, "demo")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    photos = found.get("photos")
    if photos is not None:
        pictures += [Path(path) for path in photos["pictures"]]
    if "steps" in parts:
        pictures.append(_draw_steps(out, runs))
    arms = tuple(_summarised(runs, found))
    result = DemonstrationResult(
        arms=arms,
        pictures=tuple(pictures),
        photo_top1=None if photos is None else 100 * photos["top1"],
        elapsed_s=time.monotonic() - started,
        missed=tuple(f"{arm.part}: {arm.arm}" for arm in arms if not arm.is_reached),
    )
    write_json(out / RESULT_FILE, result.as_json())
    return result


def _settings(
    recipe: str, arm: str, options: dict[str, Any], changes: dict[str, Any]
) -> VisionTrainSettings:
    settings = load_settings(VisionTrainSettings, config_path(f"vision_{recipe}"))
    model, extra = ARMS[arm]
    kept = {name: settings.overrides[name] for name in SHARED}
    name = f"{recipe} {arm}"
    return override(
        settings,
        {"model": model, "overrides": {**kept, **extra, **options}, "name": name, **changes},
    )


def _summarised(runs: Sequence[Run], found: dict[str, dict[str, Any]]) -> list[ArmResult]:
    results = []
    names = {part: list(ARMS) for part in ("pair-same", "digits")}
    names["steps"] = [f"T = {count}" for count in INNER_STEPS]
    for part, arms in names.items():
        for arm in arms:
            mine = sorted(
                (run for run in runs if (run.part, run.arm) == (part, arm)), key=lambda r: r.seed
            )
            if not mine:
                continue
            rows = [found[run.folder] for run in mine]
            results.append(
                ArmResult(
                    part=part,
                    arm=arm,
                    seeds=tuple(run.seed for run in mine),
                    top1=tuple(100 * row["top1"] for row in rows),
                    target=TARGETS.get(part, {}).get(arm),
                    elapsed_s=statistics.fmean(row["elapsed_s"] for row in rows),
                    inner_losses=_mean_losses([row["inner_losses"] for row in rows]),
                )
            )
    return results


def _mean_losses(of_seeds: list[list[list[float]]]) -> tuple[tuple[float, ...], ...]:
    """Mean over seeds of ``[layer][step]``."""
    return tuple(
        tuple(statistics.fmean(values) for values in zip(*layers, strict=True))
        for layers in zip(*of_seeds, strict=True)
    )


def _draw_steps(out: Path, runs: Sequence[Run]) -> Path:
    """The inner losses of the run with most steps, first seed, over outer training."""
    from ttt_adapt.vision.explaining.pictures import history_picture

    most = f"T = {max(INNER_STEPS)}"
    run = next(run for run in runs if (run.part, run.arm) == ("steps", most))
    history = json.loads((out / run.folder / "inner_losses.json").read_text(encoding="utf-8"))
    return history_picture(history, out / "inner-steps.png")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _train(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run, in a process of its own."""
    from ttt_adapt.vision.training import train

    settings = make_settings(VisionTrainSettings, values)
    result = train(settings, folder, device="cpu", report=_say_nothing)
    assert result.validation is not None, "the last step is validated"
    losses: list[list[float]] = []
    if settings.record_inner_losses:
        history = json.loads((folder / "inner_losses.json").read_text(encoding="utf-8"))
        losses = history[-1]["layers"]
    return {
        "top1": result.validation.top1,
        "elapsed_s": result.elapsed_s,
        "inner_losses": losses,
    }


def _learn_photos(folder: Path, num_steps: int | None) -> dict[str, Any]:
    from ttt_adapt.vision.demonstration_photos import learn_photos

    return learn_photos(folder, num_steps=num_steps)


def _say_nothing(_: str) -> None:
    """What runs beside each other report."""
