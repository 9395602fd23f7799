"""Several processes on one batch: started by ``torchrun`` or ``accelerate launch``, gradients summed.

Every process holds the whole model and takes its share of each batch's sequences; the sum of their
gradients is what one process would have computed, up to rounding. One process with two threads
waits at every matrix product; two processes with one thread wait once a step, which is faster on a
CPU. Without a launcher there is one process and nothing here costs anything.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed, nn


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among those that train together.

    Attributes:
        rank: from 0; process 0 writes files and reports.
        size: number of processes.
        device: where this process computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            distributed.barrier()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the processes: one message for all of them."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        for gradient, summed in zip(
            gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))

    def total(self, value: float) -> float:
        """The sum of a number over the processes."""
        if self.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(held)
        return float(held)


@contextmanager
def joined_world() -> Iterator[World]:
    """Join the processes that a launcher started, as its environment variables say; leave after."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(0, 1, device)
        return
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield World(distributed.get_rank(), distributed.get_world_size(), device)
    finally:
        distributed.destroy_process_group()
