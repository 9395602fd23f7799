"""A converted model as a directory that loads anywhere this package is installed."""

from pathlib import Path
from typing import Any

from ttt_adapt.errors import ModelError
from ttt_adapt.models.conversion.model import ConvertedConfig, ConvertedForCausalLM
from ttt_adapt.runtime import quiet_transformers


def require_room(folder: Path) -> None:
    """Refuse to write over anything but an earlier conversion.

    Raises:
        ModelError: ``folder`` is a file, or holds another model.
    """
    config = folder / "config.json"
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder}: expected a folder for the model, found a file; name another")
    if config.is_file() and f'"{ConvertedConfig.model_type}"' not in config.read_text("utf-8"):
        raise ModelError(f"{folder}: holds another model; name another folder")


def save_converted(model: ConvertedForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write weights (safetensors, in their own dtype), configuration and tokenizer.

    Raises:
        ModelError: ``folder`` holds another model.
    """
    require_room(folder)
    with quiet_transformers():
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    tokenizer.save_pretrained(folder)
