"""This machine: threads, allocator, processor features, devices, versions, seeds."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttt_adapt.errors import ModelError, SettingsError

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGE = 2**30


def keep_freed_memory() -> bool:
    """Ask glibc to keep large freed blocks instead of returning their pages to the kernel.

    Training allocates and frees the same tens of megabytes every step; faulting those pages in
    again costs about a tenth of the time of a small model on CPU. Returns whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in (
            (_M_MMAP_THRESHOLD, _LARGE),
            (_M_TRIM_THRESHOLD, _LARGE),
            (_M_TOP_PAD, 64 * 2**20),
        )
    )


def set_num_threads(num_threads: int) -> None:
    """Give torch and FAISS the same number of threads: each has an OpenMP runtime of its own.

    Raises:
        SettingsError: ``num_threads`` is less than one.
    """
    if num_threads < 1:
        raise SettingsError(f"num_threads: expected at least 1, found {num_threads}")
    import faiss
    import torch

    torch.set_num_threads(num_threads)
    faiss.omp_set_num_threads(num_threads)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Processor features as Linux names them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return frozenset()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_native_bfloat16(device: str = "cpu") -> bool:
    """Whether ``device`` multiplies bfloat16 matrices in hardware."""
    if device.startswith("cuda"):
        import torch

        return bool(torch.cuda.is_bf16_supported())
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def uses_bfloat16(precision: str, device: str) -> bool:
    """Whether work of this precision (``auto``, ``float32``, ``bfloat16``) autocasts on a device."""
    if precision == "auto":
        return has_native_bfloat16(device)
    return precision == "bfloat16"


def resolve_device(name: str) -> str:
    """``auto`` becomes ``cuda`` where there is one, else ``cpu``; other names must be usable.

    Raises:
        ModelError: no such kind of device, or a CUDA device that this machine lacks.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"unknown device {name!r}; use auto, cpu or cuda") from None
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
        if num_devices == 0:
            raise ModelError(f"device {name!r}: this machine has no CUDA device; use device='cpu'")
        if (device.index or 0) >= num_devices:
            raise ModelError(
                f"device {name!r}: this machine has CUDA devices 0 to {num_devices - 1} only"
            )
    return name


def derived_seed(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for one query of one run: independent of the order queries are run in."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "peft",
    "faiss-cpu",
    "datasets",
    "numpy",
    "safetensors",
    "typer",
)


def versions() -> dict[str, str]:
    """Versions of Python, ttt-adapt and the packages a result depends on; reads metadata only."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    for package in ("ttt-adapt", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def num_cpus() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars for weights that load in a blink, no advice beside our one-line errors; the
    user's choice is put back."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # its functions have no annotations
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
