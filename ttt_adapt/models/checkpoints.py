"""Where a model's files are, which of them hold weights, and their hash."""

import json
from pathlib import Path
from typing import Any

from ttt_adapt.errors import ModelError
from ttt_adapt.storage import sha256_file, stable_hash

BUNDLED = Path(__file__).parent / "bundled"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_file_hashes: dict[tuple[str, int, int], str] = {}


def bundled_models() -> list[str]:
    """Names of the models that come with the package, sorted."""
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def resolve_model(name: str) -> str:
    """A bundled model's name becomes its directory; anything else is returned as it is."""
    return str(BUNDLED / name) if name in bundled_models() else name


def checkpoint_folder(name: str, revision: str | None) -> Path:
    """The directory that holds a loaded model's files: its own, or the hub cache's snapshot."""
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils.hub import cached_file

    found = cached_file(name, "config.json", revision=revision, local_files_only=True)
    return Path(str(found)).parent


def require_safetensors(folder: Path) -> None:
    """Refuse a local directory that cannot be loaded safely.

    Raises:
        ModelError: no ``config.json``, no safetensors, or pickled weights only.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: expected a model directory with config.json, found none; "
            "write one with model.save_pretrained(...)"
        )
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    found = f"only {', '.join(pickled[:3])}, which loading would unpickle" if pickled else "none"
    raise ModelError(
        f"{folder}: expected weights in safetensors, found {found}; "
        "save them with model.save_pretrained(...)"
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: one, or the shards its index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        single = folder / "model.safetensors"
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    entries: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
    return [folder / name for name in sorted(set(entries["weight_map"].values()))]


def checkpoint_fingerprint(folder: Path, *, tokenizer: str, dtype: str) -> str:
    """SHA-256 over the weights' bytes, the configuration, the tokenizer's hash and the dtype."""
    files = [*weight_files(folder), folder / "config.json"]
    return stable_hash(
        {
            "files": {path.name: _cached_sha256(path) for path in files},
            "tokenizer": tokenizer,
            "dtype": dtype,
        }
    )


def _cached_sha256(path: Path) -> str:
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _file_hashes:
        _file_hashes[key] = sha256_file(path)
    return _file_hashes[key]
