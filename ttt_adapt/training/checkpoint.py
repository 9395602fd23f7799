"""Checkpoints of an outer loop: safetensors and JSON only, whole or absent, resumable to the bit.

A checkpoint is a folder ``checkpoints/step-00001200`` that appears by one rename. Tensors of the
model are stored as ``model.<name>``, of optimizer ``i`` as ``optimizer.<i>.<parameter>.<entry>``.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ttt_adapt.errors import FingerprintMismatchError
from ttt_adapt.storage import remove_orphans, sync_file, sync_folder, temporary_sibling

FOLDER = re.compile(r"step-(\d{8})")


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint after ``step`` outer steps, then drop all but the newest ``keep``.

    Args:
        state: JSON values to hand back on resume (losses so far, the settings' key, …).
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_orphans(folder)
    target = folder / f"step-{step:08d}"
    temporary = temporary_sibling(target)
    temporary.mkdir()
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for position, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for entry, value in entries.items():
                tensors[f"optimizer.{position}.{index}.{entry}"] = torch.as_tensor(value)
    save_file(
        {k: v.contiguous().clone() for k, v in tensors.items()}, temporary / "state.safetensors"
    )
    (temporary / "state.json").write_text(json.dumps({"step": step, **state}), encoding="utf-8")
    for path in temporary.iterdir():
        sync_file(path)
    sync_folder(temporary)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    sync_folder(folder)
    for old in _finished(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    key: str,
) -> dict[str, Any] | None:
    """Load the newest checkpoint into ``model`` and ``optimizers``; ``None`` when there is none.

    Raises:
        FingerprintMismatchError: the checkpoint was written under other settings.
    """
    finished = _finished(folder)
    if not finished:
        return None
    newest = finished[-1]
    state: dict[str, Any] = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    if state["key"] != key:
        raise FingerprintMismatchError(
            f"{newest} was written under other settings than those given; "
            "use the settings saved beside it, or another output folder"
        )
    tensors = load_file(newest / "state.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for position, optimizer in enumerate(optimizers):
        layout = optimizer.state_dict()
        entries: dict[int, dict[str, torch.Tensor]] = {}
        prefix = f"optimizer.{position}."
        for name, value in tensors.items():
            if name.startswith(prefix):
                index, entry = name.removeprefix(prefix).split(".", 1)
                entries.setdefault(int(index), {})[entry] = value
        optimizer.load_state_dict({"state": entries, "param_groups": layout["param_groups"]})
    return state


def _finished(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if FOLDER.fullmatch(path.name))
