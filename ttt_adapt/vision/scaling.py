"""Throughput and peak memory over resolutions: who is linear in tokens, and where lines cross.

Shape legend: B images, C channels, H W pixels, T tokens.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from ttt_adapt.errors import ModelError
from ttt_adapt.runtime import resolve_device

# The profiler would tell standard error whenever it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

RESOLUTIONS = (224, 384, 512, 768, 1024, 1280)
Mode = Literal["inference", "training"]
Measured = Callable[["Measurement"], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """A model to measure.

    Attributes:
        label: in tables.
        model: as ``create_model`` knows it.
        overrides: other arguments of it.
        explicit_attention: softmax attention writes its T × T matrix, as DeiT did when it was
            published, instead of calling torch's fused operator.
    """

    label: str
    model: str
    overrides: tuple[tuple[str, Any], ...] = ()
    explicit_attention: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model at one resolution.

    Attributes:
        seconds: least of several turns, for the whole batch; of processor time where one thread
            computes on a CPU, else of wall time.
        peak_bytes: most that was allocated at once beyond the weights and the images; on a CPU
            by torch's allocator, on a GPU by its caching allocator.
        gmacs: billions of multiply-adds of an image's forward.
    """

    label: str
    resolution: int
    num_tokens: int
    batch_size: int
    seconds: float
    images_per_s: float
    peak_bytes: int
    gmacs: float


def default_arms(size: str = "tiny") -> tuple[Arm, ...]:
    """Vision-TTT, and DeiT-style attention of the same size: fused, and as DeiT computed it."""
    attention = f"vit_{size if size != 'base' else 'small'}_attention"
    widths: tuple[tuple[str, Any], ...] = ()
    if size == "base":
        widths = (("dim", 768), ("num_heads", 12))
    return (
        Arm(f"Vision-TTT {size}", f"vision_ttt_{size}"),
        Arm(f"attention {size}, fused", attention, widths),
        Arm(f"attention {size}, T × T written", attention, widths, explicit_attention=True),
    )


def measure(
    arms: Sequence[Arm],
    resolutions: Sequence[int] = RESOLUTIONS,
    *,
    batch_size: int = 1,
    mode: Mode = "inference",
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    num_turns: int = 3,
    min_turns_s: float = 0.3,
    report: Measured | None = None,
) -> list[Measurement]:
    """Every arm at every resolution; at each resolution the arms take turns, least times count.

    Args:
        mode: ``inference``: the forward without gradients; ``training``: forward and backward.
        num_turns: at most; fewer once every arm ran for ``min_turns_s`` and two turns are done.
        report: receives each measurement as it is made.

    Raises:
        ModelError: no such device or model, or resolutions that are no multiples of the patch.
    """
    place = torch.device(resolve_device(device))
    models = {arm.label: _build(arm, place, dtype, max(resolutions)) for arm in arms}
    found = []
    for resolution in resolutions:
        generator = torch.Generator().manual_seed(resolution)
        images = torch.randn(batch_size, 3, resolution, resolution, generator=generator)
        images = images.to(place, dtype)
        least = {arm.label: math.inf for arm in arms}
        peaks = {arm.label: 0 for arm in arms}
        spent = {arm.label: 0.0 for arm in arms}
        for turn in range(num_turns + 1):
            for arm in arms:
                run = _pass(models[arm.label], images, mode, explicit=arm.explicit_attention)
                if turn == 0:  # warms up, too
                    peaks[arm.label] = peak_bytes(run, place)
                    continue
                taken = _seconds(run, place)
                least[arm.label] = min(least[arm.label], taken)
                spent[arm.label] += taken
            if turn >= 2 and min(spent.values()) >= min_turns_s:
                break
        for arm in arms:
            side = models[arm.label].settings.patch_size
            row = Measurement(
                arm.label,
                resolution,
                math.ceil(resolution / side) ** 2,
                batch_size,
                least[arm.label],
                batch_size / least[arm.label],
                peaks[arm.label],
                _gmacs(models[arm.label], resolution),
            )
            found.append(row)
            if report is not None:
                report(row)
    return found


def growth(
    rows: Sequence[Measurement], label: str, value: str = "seconds", *, num_largest: int = 3
) -> float:
    """Exponent of tokens by which a value grows, fitted to the largest resolutions: 1 is linear, 2
    quadratic; NaN with fewer than two."""
    mine = sorted((row for row in rows if row.label == label), key=lambda row: row.num_tokens)
    used = [row for row in mine if getattr(row, value) > 0][-num_largest:]
    if len(used) < 2:
        return math.nan
    fitted = statistics.linear_regression(
        [math.log(row.num_tokens) for row in used],
        [math.log(getattr(row, value)) for row in used],
    )
    return fitted.slope


def crossover(
    rows: Sequence[Measurement], label: str, other: str, value: str = "seconds"
) -> float | None:
    """Tokens from which on ``label`` needs less than ``other``, by a straight line between resolutions
    on logarithmic scales; the least resolution's where it always does, ``None`` where it never does.
    """
    ours, theirs = (
        {row.num_tokens: float(getattr(row, value)) for row in rows if row.label == name}
        for name in (label, other)
    )
    shared = sorted(set(ours) & set(theirs))
    gaps = [math.log(max(ours[t], 1e-12) / max(theirs[t], 1e-12)) for t in shared]
    if not shared or gaps[-1] >= 0:
        return None
    place = len(shared) - 1
    while place and gaps[place - 1] < 0:
        place -= 1
    if not place:
        return float(shared[0])
    low, high = shared[place - 1], shared[place]
    part = gaps[place - 1] / (gaps[place - 1] - gaps[place])
    return math.exp(math.log(low) + part * math.log(high / low))


def summarise(rows: Sequence[Measurement], labels: Sequence[str]) -> dict[str, Any]:
    """Growth and crossovers of the first label against the others, as values and as lines to read.

    Returns:
        ``growth``: by label, the exponents of tokens for ``seconds`` and ``peak_bytes``;
        ``crossover``: by other label, the tokens from which on the first needs less of either, or
        ``None``; ``ratios``: at the largest resolution, how many times as much the others need;
        ``lines``: these as sentences.
    """
    ours, others = labels[0], labels[1:]
    values = ("seconds", "peak_bytes")
    grows = {label: {v: growth(rows, label, v) for v in values} for label in labels}
    crosses = {label: {v: crossover(rows, ours, label, v) for v in values} for label in others}
    most = max(row.num_tokens for row in rows)
    last = {row.label: row for row in rows if row.num_tokens == most}
    ratios = {
        label: {
            v: getattr(last[label], v) / max(float(getattr(last[ours], v)), 1e-12) for v in values
        }
        for label in others
    }
    lines = [
        f"{label}: time grows as tokens to the power {grown['seconds']:.2f}, memory to the power "
        f"{grown['peak_bytes']:.2f} (the three largest resolutions)"
        for label, grown in grows.items()
    ]
    for label in others:
        words = [
            f"{what} never"
            if crosses[label][v] is None
            else f"{what} from {crosses[label][v]:.0f} tokens"
            for what, v in (("faster", "seconds"), ("smaller", "peak_bytes"))
        ]
        lines.append(
            f"{ours} against {label}: {words[0]}, {words[1]}; at {most} tokens "
            f"{label} takes {ratios[label]['seconds']:.2f}× the time and "
            f"{ratios[label]['peak_bytes']:.2f}× the memory"
        )
    return {"growth": grows, "crossover": crosses, "ratios": ratios, "lines": lines}


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most that ``run`` had allocated at once beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    results: Any = seen.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        held += event.nbytes()
        most = max(most, held)
    return int(most)


def explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Softmax attention with its matrix of weights ``[B, N, T, T]`` written out."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = (query @ key.mT) * scale
    return weights.softmax(-1) @ value


def _build(arm: Arm, device: torch.device, dtype: torch.dtype, largest: int) -> Any:
    from ttt_adapt.vision.models import create_model

    torch.manual_seed(0)
    model = create_model(arm.model, **dict(arm.overrides))
    patch = model.settings.patch_size
    if largest % patch:
        raise ModelError(f"expected resolutions that are multiples of {patch}, found {largest}")
    return model.to(device, dtype)


def _pass(
    model: nn.Module, images: torch.Tensor, mode: Mode, *, explicit: bool
) -> Callable[[], Any]:
    def inference() -> Any:
        model.eval()
        with torch.no_grad():
            return model(images)

    def training() -> Any:
        model.train()
        model.zero_grad(set_to_none=True)
        model(images).float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    chosen = inference if mode == "inference" else training
    if not explicit:
        return chosen

    def written() -> Any:
        fused = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = explicit_attention  # type: ignore[assignment]
        try:
            return chosen()
        finally:
            functional.scaled_dot_product_attention = fused

    return written


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    cuda = device.type == "cuda"
    # One thread's processor time does not count what other programs take.
    alone = not cuda and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    if cuda:
        torch.cuda.synchronize(device)
    begun = clock()
    run()
    if cuda:
        torch.cuda.synchronize(device)
    return clock() - begun


def _gmacs(model: Any, resolution: int) -> float:
    from ttt_adapt.vision.costs import count_macs

    return count_macs(model, resolution) / 1e9
