"""Arithmetic as its dtypes say, also under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off, where there is autocast (there is none for tensors without memory)."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
