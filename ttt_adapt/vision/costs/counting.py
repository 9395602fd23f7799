"""Count a model's multiply-adds: by formula for each module, and by torch's counter.

    count_macs(create_model("vision_ttt_tiny"), 224)  # 1_451_592_192
    print(cost_table(model, (512, 768)))

Nothing is computed: tensors have shapes, and no memory.

Shape legend: B images, C channels, H W pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ttt_adapt.errors import ModelError
from ttt_adapt.vision.costs.formulas import formula_for


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """What one module computes itself, the modules inside it aside.

    Attributes:
        name: its place in the model, ``blocks.0.mixer``.
        kind: its class.
        macs: multiply-adds of a forward.
        num_parameters: of its own.
    """

    name: str
    kind: str
    macs: int
    num_parameters: int


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's multiply-adds, module by module.

    Attributes:
        modules: those with a formula, in the order of the model.
        macs: their sum.
        counted: by torch's counter; the same number.
        num_parameters: of the whole model.
    """

    modules: tuple[ModuleCost, ...]
    macs: int
    counted: int
    num_parameters: int

    def __str__(self) -> str:
        """A table: multiply-adds in millions, share, parameters."""
        width = max([6, *(len(module.name) for module in self.modules)])
        lines = [f"{'module':<{width}}  {'kind':<16} {'MMACs':>12} {'%':>6} {'parameters':>12}"]
        for module in self.modules:
            share = 100 * module.macs / max(1, self.macs)
            lines.append(
                f"{module.name:<{width}}  {module.kind:<16} {module.macs / 1e6:>12.3f} {share:>6.2f} "
                f"{module.num_parameters:>12,}"
            )
        lines.append(
            f"{'total':<{width}}  {'':<16} {self.macs / 1e6:>12.3f} {100:>6.2f} "
            f"{self.num_parameters:>12,}"
        )
        return "\n".join(lines)


def count_macs(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    batch_size: int = 1,
    in_channels: int | None = None,
) -> int:
    """Multiply-adds of one forward (half of what is called FLOPs elsewhere; both papers' "FLOPs").

    Args:
        model: of :func:`ttt_adapt.vision.create_model`, or any whose products all lie in modules that
            have a formula (see :func:`register_macs`).
        image_size: height and width in pixels; one number is a square.
        batch_size: B.
        in_channels: C; ``None``: ``model.settings.in_channels``, or 3.

    Raises:
        ModelError: a module computes what no formula counts; the message says where.
    """
    return cost_table(model, image_size, batch_size=batch_size, in_channels=in_channels).macs


def count_macs_by_counter(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    batch_size: int = 1,
    in_channels: int | None = None,
) -> int:
    """The same by torch's counter alone, whatever the model is made of."""
    images = _images(model, image_size, batch_size, in_channels)
    with _without_computing(model):
        return _counted(model, images)[0]


def cost_table(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    batch_size: int = 1,
    in_channels: int | None = None,
) -> ModelCost:
    """As :func:`count_macs`, module by module."""
    found: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        formula = formula_for(module)
        if formula is None:
            continue

        def hook(
            module: nn.Module,
            inputs: tuple[Any, ...],
            output: Any,
            name: str = name,
            formula: Any = formula,
        ) -> None:
            found[name] = found.get(name, 0) + formula(module, inputs, output)

        hooks.append(module.register_forward_hook(hook))
    images = _images(model, image_size, batch_size, in_channels)
    try:
        with _without_computing(model):
            counted, by_module = _counted(model, images)
    finally:
        for registered in hooks:
            registered.remove()
    modules = dict(model.named_modules())
    costs = tuple(
        ModuleCost(
            name,
            type(modules[name]).__name__,
            found[name],
            sum(parameter.numel() for parameter in modules[name].parameters(recurse=False)),
        )
        for name in modules
        if name in found
    )
    total = sum(found.values())
    if total != counted:
        raise ModelError(_disagreement(model, found, by_module, total, counted))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelCost(costs, total, counted, parameters)


def _counted(model: nn.Module, images: torch.Tensor) -> tuple[int, dict[str, int]]:
    """All multiply-adds, and those of each module with the modules inside it."""
    with FlopCounterMode(display=False) as counter:
        model(images)
    root = type(model).__name__
    by_module = {
        name.removeprefix(root).removeprefix("."): sum(counts.values()) // 2
        for name, counts in counter.get_flop_counts().items()
    }
    return counter.get_total_flops() // 2, by_module


def _disagreement(
    model: nn.Module,
    found: dict[str, int],
    by_module: dict[str, int],
    total: int,
    counted: int,
) -> str:
    """Names the innermost module whose formulas don't add up to what the counter saw."""
    place = ""
    for name, _ in model.named_modules():
        inside = sum(
            macs
            for at, macs in found.items()
            if at == name or at.startswith(f"{name}.") or not name
        )
        if name and by_module.get(name, 0) != inside and len(name) >= len(place):
            place = name
    kind = type(dict(model.named_modules())[place]).__name__
    return (
        f"expected formulas for all that {type(model).__name__} multiplies ({counted:,} multiply-adds), "
        f"found {total:,}; register_macs one for {kind} ({place or 'the model'}), or use "
        "count_macs_by_counter"
    )


def _images(
    model: nn.Module,
    image_size: int | tuple[int, int],
    batch_size: int,
    in_channels: int | None,
) -> torch.Tensor:
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(height, width, batch_size) < 1:
        raise ModelError(
            f"expected images of at least one pixel, found {batch_size} of {height} × {width}"
        )
    known: int = getattr(getattr(model, "settings", None), "in_channels", 3)
    channels = known if in_channels is None else in_channels
    like = next(model.parameters(), torch.empty(0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        images = torch.empty(
            batch_size, channels, height, width, dtype=like.dtype, device=like.device
        )
        assert images.fake_mode is mode  # type: ignore[attr-defined]
    return images


@contextmanager
def _without_computing(model: nn.Module) -> Iterator[None]:
    """Evaluation without memory; the model and torch's random numbers are left as they were."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
