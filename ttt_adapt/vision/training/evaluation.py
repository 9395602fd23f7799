"""How well a model classifies."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.vision.data.batches import Batch

Total = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Classification:
    """Accuracy over a set of images.

    Attributes:
        num_images: how many.
        top1: share whose class scored highest.
        top5: share whose class is among the five highest (of all, where there are fewer).
        loss_nats: mean cross-entropy.
    """

    num_images: int
    top1: float
    top5: float
    loss_nats: float


@torch.no_grad()
def classify(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    precision: str = "float32",
    total: Total | None = None,
    progress: Callable[[int], None] | None = None,
) -> Classification:
    """Classify every image of ``batches``; the model is in evaluation mode meanwhile.

    Args:
        total: sums a tensor over the processes that share the images.
        progress: receives the number of images done.
    """
    device = torch.device(device)
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    done = 0
    try:
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logits = model(images)
            logits = logits.float()
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            found = [best[:, 0].sum(), best.any(1).sum(), loss, torch.tensor(len(labels))]
            sums += torch.stack([value.to(sums) for value in found])
            done += len(labels)
            if progress is not None:
                progress(done)
    finally:
        model.train(was_training)
    top1, top5, loss_nats, count = (total(sums) if total else sums).tolist()
    num_images = round(count)
    if not num_images:
        return Classification(0, math.nan, math.nan, math.nan)
    return Classification(num_images, top1 / count, top5 / count, loss_nats / count)
