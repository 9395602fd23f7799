"""Batches in a seeded order that any process can start in the middle of.

Which images a step sees, and what augmentation does to each, follow from the seed, the pass over the
data and the image's number: not from how many worker processes read them, nor from where a run was
interrupted. Several training processes each take every so-manieth image of a batch.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from ttt_adapt.errors import ImageError
from ttt_adapt.runtime import derived_seed
from ttt_adapt.vision.data.digits import PairSame, digit_images
from ttt_adapt.vision.data.folders import FolderImages
from ttt_adapt.vision.data.images import LabelledImages
from ttt_adapt.vision.data.settings import AugmentationSettings, ImageDataSettings
from ttt_adapt.vision.data.transforms import EvaluationTransform, TrainingTransform

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images float32 ``[B, C, H, W]`` and labels int64 ``[B]``."""


def open_images(
    settings: ImageDataSettings, split: str | None = None, *, training: bool = False, seed: int = 0
) -> LabelledImages:
    """The images of one split; ``None``: the settings' training or validation split.

    Args:
        seed: of the training pairs of ``pair-same``.

    Raises:
        ImageError: they are not there, or not laid out as the settings say.
    """
    name = split or (settings.train_split if training else settings.validation_split)
    if settings.kind == "folder":
        root = Path(settings.path)
        if training or settings.train_split == name:
            return FolderImages(root, name)
        try:
            # The same folder is class 3 in both splits, also where one lacks a class.
            classes = FolderImages(root, settings.train_split).classes
        except ImageError:
            classes = None
        return FolderImages(root, name, classes=classes)
    if settings.kind == "hub":
        from ttt_adapt.vision.data.hub import HubImages

        return HubImages(settings, name)
    held = digit_images(name, split_seed=settings.split_seed)
    if settings.kind == "digits":
        return held
    if name == settings.train_split:
        return PairSame(held, settings.num_pairs, seed)
    return PairSame(held, settings.num_validation_pairs, settings.split_seed)


class TrainingBatches:
    """An endless sequence of batches; iterate from any step.

    Args:
        images: what is drawn from, each once a pass; the last, incomplete batch of a pass is
            dropped.
        batch_size: over all processes.
        rank: of this process among ``num_processes``, which must divide ``batch_size``.
        num_workers: processes that decode; 0 decodes here.

    Raises:
        ImageError: fewer images than one batch.
    """

    def __init__(
        self,
        images: LabelledImages,
        data: ImageDataSettings,
        augmentation: AugmentationSettings,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        num_processes: int = 1,
        num_workers: int = 0,
    ) -> None:
        if len(images) < batch_size:
            raise ImageError(
                f"expected at least one batch of {batch_size} training images, "
                f"found {len(images)}; lower batch_size"
            )
        self.steps_per_epoch = len(images) // batch_size
        self._images = _AugmentedImages(images, TrainingTransform(data, augmentation), seed)
        self._places = _Places(len(images), batch_size, seed, rank, num_processes)
        self._num_workers = num_workers

    def starting_at(self, step: int) -> Iterator[Batch]:
        """This process's share of the batches of steps ``step``, ``step + 1``, …"""
        self._places.first = step
        workers: dict[str, Any] = {}
        if self._num_workers:
            workers = {"multiprocessing_context": "spawn", "prefetch_factor": 2}
        loader = DataLoader(
            self._images,
            batch_sampler=self._places,
            num_workers=self._num_workers,
            collate_fn=_stacked,
            **workers,
        )
        return iter(loader)


def evaluation_batches(
    images: LabelledImages,
    data: ImageDataSettings,
    *,
    batch_size: int,
    rank: int = 0,
    num_processes: int = 1,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Every image once, in order; process ``rank`` takes every ``num_processes``-th."""
    mine = list(range(rank, len(images), num_processes))
    workers: dict[str, Any] = {"multiprocessing_context": "spawn"} if num_workers else {}
    return iter(
        DataLoader(
            _FixedImages(images, EvaluationTransform(data)),
            batch_sampler=[mine[at : at + batch_size] for at in range(0, len(mine), batch_size)],
            num_workers=num_workers,
            collate_fn=_stacked,
            **workers,
        )
    )


class _Places(Sampler[list[tuple[int, int]]]):
    """Batches of (pass, image number) without end."""

    def __init__(self, total: int, size: int, seed: int, rank: int, num_processes: int) -> None:
        if size % num_processes:
            raise ImageError(
                f"expected a batch_size that {num_processes} processes can share, found {size}"
            )
        self.total, self.size, self.seed = total, size, seed
        self.rank, self.num_processes = rank, num_processes
        self.first = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_epoch = self.total // self.size
        step = self.first
        while True:
            epoch, batch = divmod(step, per_epoch)
            order = _order(self.total, self.seed, epoch)
            chosen = order[batch * self.size : (batch + 1) * self.size]
            yield [(epoch, int(place)) for place in chosen[self.rank :: self.num_processes]]
            step += 1


@lru_cache(maxsize=4)
def _order(total: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng(derived_seed(seed, "order", epoch)).permutation(total)


class _AugmentedImages(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, images: LabelledImages, transform: TrainingTransform, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed
        self._idle = np.random.default_rng(0)

    def __getitem__(self, place: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = place
        generator = self._idle
        if self.transform.is_random:
            seed = derived_seed(self.seed, "augmentation", epoch, index)
            generator = np.random.default_rng(seed)
        return self.transform(self.images.image(index), generator), self.images.label(index)


class _FixedImages(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, images: LabelledImages, transform: EvaluationTransform) -> None:
        self.images, self.transform = images, transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images.image(index)), self.images.label(index)


def _stacked(items: list[tuple[torch.Tensor, int]]) -> Batch:
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)
