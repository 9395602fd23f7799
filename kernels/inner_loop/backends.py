"""Which implementation computes: asked for by name, or chosen, and said once when it is not Triton."""

import functools
import importlib.util
import os
import warnings
from typing import Literal

import torch

from ttt_adapt.errors import OperatorInputError

Backend = Literal["auto", "reference", "chunked", "triton"]
BACKENDS = ("auto", "reference", "chunked", "triton")

TRITON_WIDTHS = (32, 64, 128)
"""Head widths the Triton kernels are written for."""

TRITON_MOST_TOKENS = 64
"""The largest mini-batch whose blocks fit a program of the Triton kernels."""

TRITON_HIDDEN_UNIT = 16
"""What the Triton kernels stream an inner model's hidden width in multiples of."""


def choose_backend(
    name: str,
    backend: str,
    q: torch.Tensor,
    *,
    causal: bool,
    mini_batch_size: int = 1,
    hidden: int = 0,
) -> str:
    """``auto`` is Triton on a GPU where it can, else the chunked form; other names stand.

    Raises:
        OperatorInputError: an unknown backend, or Triton where it cannot run.
    """
    if backend not in BACKENDS:
        raise OperatorInputError(
            f"{name}: expected a backend of {', '.join(BACKENDS)}, found {backend!r}"
        )
    if backend in ("reference", "chunked"):
        return backend
    obstacle = triton_obstacle(q, causal=causal, mini_batch_size=mini_batch_size, hidden=hidden)
    if backend == "triton":
        if obstacle:
            raise OperatorInputError(f"{name}: backend 'triton' needs {obstacle}")
        return "triton"
    if obstacle and q.device.type == "cuda":
        _say_once(name, obstacle)
    return "chunked" if obstacle or q.device.type != "cuda" else "triton"


def triton_obstacle(
    q: torch.Tensor, *, causal: bool, mini_batch_size: int = 1, hidden: int = 0
) -> str:
    """What Triton lacks for these tensors; empty when it can run."""
    if not has_triton():
        return "the package triton; pip install triton"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a GPU (tensors are on {q.device}), or TRITON_INTERPRET=1 for tests"
    if q.shape[-1] not in TRITON_WIDTHS:
        return f"a head width of {', '.join(map(str, TRITON_WIDTHS))}, found {q.shape[-1]}"
    if q.dtype == torch.float64:
        return "float32, bfloat16 or float16, found float64"
    if mini_batch_size > TRITON_MOST_TOKENS:
        return f"mini-batches of at most {TRITON_MOST_TOKENS}, found {mini_batch_size}"
    if hidden % TRITON_HIDDEN_UNIT:
        return f"a hidden width that is a multiple of {TRITON_HIDDEN_UNIT}, found {hidden}"
    if not causal:
        return "causal=True; the non-causal form has no kernel"
    return ""


@functools.cache
def has_triton() -> bool:
    """Whether the package is installed; importing it is left to the kernels."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _say_once(name: str, obstacle: str) -> None:
    warnings.warn(
        f"{name}: using the chunked PyTorch form, for Triton needs {obstacle}", stacklevel=4
    )
