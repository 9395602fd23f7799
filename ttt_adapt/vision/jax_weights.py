"""Checkpoints of MTTT's public JAX code as models of this library.

    model = load_jax_checkpoint("checkpoint.npz", steps=4, strategy="sgd")

The code saves flat names, ``Transformer/encoderblock_0/TTTLayer_0/phi/kernel``, in an ``.npz``, below
``params/``, with the optimizer's state beside them. Widths, depth, heads and the kind of layer are read
off the shapes; what leaves no trace there (inner steps and rates, SGD, elu) is said by the caller.

Shape legend: D width, N heads, d head width, F hidden width, C channels, P patch size.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ttt_adapt.errors import ModelError
from ttt_adapt.vision.models import VisionModel, create_model

Arrays = Mapping[str, Any]
"""Arrays by flat name, or nested mappings of them."""

_BLOCK = "Transformer/encoderblock_"
_MIXERS = {
    "attention": "MultiHeadDotProductAttention_0",
    "linear_attention": "LinearAttention_0",
    "mttt": "TTTLayer_0",
}


def load_jax_checkpoint(path: str | Path, **overrides: Any) -> VisionModel:
    """The model of a checkpoint file, in evaluation mode, float32.

    Args:
        path: the ``.npz`` that the code's training wrote.
        overrides: as for :func:`model_from_jax`.

    Raises:
        ModelError: no such file, none that NumPy reads without unpickling, or not such a checkpoint.
    """
    try:
        # An .npy would not be a zip file.
        with zipfile.ZipFile(path):
            pass
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if not _is_optimizer_s(name)}
    except FileNotFoundError:
        raise ModelError(f"{path}: no such checkpoint") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{path}: expected an .npz of arrays alone, as MTTT's code saves it: {error}"
        ) from None
    return model_from_jax(arrays, **overrides)


def model_from_jax(parameters: Arrays, **overrides: Any) -> VisionModel:
    """The model of flax parameters, in evaluation mode, float32.

    Args:
        parameters: flat, ``{"head/kernel": ...}``, or nested as flax has them; ``params`` above all of
            them may be there or not.
        overrides: of :func:`ttt_adapt.vision.create_model`: ``steps``, ``strategy`` and ``eta`` that
            the model was trained with, ``feature_map`` of linear attention, ``image_size`` where it is
            not 224.

    Raises:
        ModelError: names that are missing or unknown, shapes that do not fit.
        SettingsError: unknown overrides.
    """
    arrays = _flat(parameters)
    options = architecture_of(arrays)
    name = options.pop("name")
    model = create_model(name, **{**options, **overrides})
    state = convert_jax_weights(arrays)
    wanted = model.state_dict()
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or unknown:
        raise ModelError(
            f"expected the parameters of {name}, found none for {missing or 'nothing'} and no place "
            f"for {unknown or 'nothing'}; do the overrides fit the checkpoint?"
        )
    for key, tensor in state.items():
        if tensor.shape != wanted[key].shape:
            raise ModelError(
                f"{key}: expected {list(wanted[key].shape)}, found {list(tensor.shape)}; do the "
                "overrides fit the checkpoint?"
            )
    model.load_state_dict(state)
    return model.eval()


def architecture_of(parameters: Arrays) -> dict[str, Any]:
    """The registered name, under ``name``, and the overrides that a checkpoint's shapes tell.

    Raises:
        ModelError: names that such a checkpoint has are missing.
    """
    arrays = _flat(parameters)
    embedding, head = _get(arrays, "embedding/kernel"), _get(arrays, "head/kernel")
    patch, _, channels, dim = embedding.shape
    blocks = {name.removeprefix(_BLOCK).split("/")[0] for name in arrays if name.startswith(_BLOCK)}
    block = f"{_BLOCK}0"
    mixer = next((m for m, at in _MIXERS.items() if _under(arrays, f"{block}/{at}/")), None)
    if mixer is None:
        raise ModelError(
            f"expected one of {', '.join(_MIXERS.values())} in {block}, found "
            f"{sorted(_under(arrays, block)) or 'nothing'}"
        )
    layer = f"{block}/{_MIXERS[mixer]}"
    perceptron = _get(arrays, f"{block}/MlpBlock_0/Dense_0/kernel")
    found: dict[str, Any] = {
        "name": f"vit_tiny_{mixer}",
        "patch_size": int(patch),
        "in_channels": int(channels),
        "dim": int(dim),
        "depth": len(blocks),
        "num_classes": int(head.shape[1]),
        "mlp_ratio": perceptron.shape[1] / int(dim),
    }
    if mixer == "mttt":
        learner = "mlp" if f"{layer}/inner_Dense_1/kernel" in arrays else "linear"
        found |= {
            "name": f"vit_tiny_mttt_{learner}",
            "num_heads": int(_get(arrays, f"{layer}/phi/kernel").shape[0]),
            "decoder_norm": f"{layer}/decoder_LN/scale" in arrays,
            "learner_bias": f"{layer}/inner_Dense_0/bias" in arrays,
            "initial": "learned" if _initial_weights_matter(arrays) else "zero",
        }
    elif mixer == "attention":
        found["num_heads"] = int(_get(arrays, f"{layer}/query/kernel").shape[1])
    else:
        # Its heads are nowhere in the shapes: those of the papers' sizes.
        found["num_heads"] = max(1, int(dim) // 64)
    if "pos_embedding" in arrays:
        side = round(arrays["pos_embedding"].shape[1] ** 0.5)
        found |= {"position": "learned", "image_size": side * int(patch)}
    return found


def convert_jax_weights(parameters: Arrays) -> dict[str, torch.Tensor]:
    """Flax parameters under this library's names and layouts, float32 (float64 stays).

    Raises:
        ModelError: names that no model of the code has.
    """
    arrays = dict(_flat(parameters))
    state: dict[str, NDArray[Any]] = {}

    def take(source: str) -> NDArray[Any]:
        return np.asarray(arrays.pop(source))

    def move(source: str, target: str) -> None:
        """A layer norm, or a linear map: ``kernel [in, out]`` to ``weight [out, in]``."""
        for kind, name in (("kernel", "weight"), ("scale", "weight"), ("bias", "bias")):
            if f"{source}/{kind}" in arrays:
                array = take(f"{source}/{kind}")
                state[f"{target}.{name}"] = array.T if kind == "kernel" else array

    matter = _initial_weights_matter(arrays)
    state["patch_embed.proj.weight"] = take("embedding/kernel").transpose(3, 2, 0, 1)
    state["patch_embed.proj.bias"] = take("embedding/bias")
    if "pos_embedding" in arrays:
        state["positions.table"] = take("pos_embedding")[0]
    blocks = sorted(
        {name.removeprefix(_BLOCK).split("/")[0] for name in arrays if name.startswith(_BLOCK)}
    )
    for index in blocks:
        block, ours = f"{_BLOCK}{index}", f"blocks.{index}"
        move(f"{block}/LayerNorm_0", f"{ours}.norm1")
        move(f"{block}/LayerNorm_1", f"{ours}.norm2")
        move(f"{block}/MlpBlock_0/Dense_0", f"{ours}.mlp.fc1")
        move(f"{block}/MlpBlock_0/Dense_1", f"{ours}.mlp.fc2")
        linear = f"{block}/{_MIXERS['linear_attention']}"
        for theirs in ("query", "key", "value"):
            move(f"{linear}/{theirs}", f"{ours}.mixer.{theirs}")
        move(f"{linear}/proj", f"{ours}.mixer.out")
        for source, target, array in (
            *_attention(arrays, f"{block}/{_MIXERS['attention']}"),
            *_mttt(arrays, f"{block}/{_MIXERS['mttt']}", matter),
        ):
            arrays.pop(source)
            if target:
                state[f"{ours}.mixer.{target}"] = array
    move("Transformer/encoder_norm", "norm")
    move("pre_logits", "pre_logits.0")
    move("head", "head")
    if arrays:
        raise ModelError(
            f"expected the parameters of MTTT's JAX code, found besides {sorted(arrays)}"
        )
    return {name: _tensor(array) for name, array in state.items()}


Moved = list[tuple[str, str, NDArray[Any]]]
"""Name there, name here (empty: left out), array."""


def _attention(arrays: Arrays, layer: str) -> Moved:
    """flax's ``query/kernel [D, N, d]`` and ``out/kernel [N, d, D]``."""
    found: Moved = []
    for name in ("query", "key", "value", "out"):
        for kind, ours in (("kernel", "weight"), ("bias", "bias")):
            source = f"{layer}/{name}/{kind}"
            if source not in arrays:
                continue
            array = np.asarray(arrays[source])
            if kind == "bias":
                array = array.reshape(-1)
            elif name == "out":
                array = array.reshape(-1, array.shape[-1]).T
            else:
                array = array.reshape(array.shape[0], -1).T
            found.append((source, f"{name}.{ours}", array))
    return found


def _mttt(arrays: Arrays, layer: str, initial_weights_matter: bool) -> Moved:
    """``phi/kernel [N, D, d]``, ``g/kernel [N, d, D]``, ``h/kernel [N, d, D]``, W0 by heads."""
    inner = {"inner_Dense_0/kernel": "inner.weight", "inner_Dense_0/bias": "inner.bias"}
    if f"{layer}/inner_Dense_1/kernel" in arrays:
        inner = {
            f"inner_Dense_{index}/{kind}": f"inner.{name}{index + 1}"
            for index in (0, 1)
            for kind, name in (("kernel", "w"), ("bias", "b"))
        }
    if not initial_weights_matter:
        inner = dict.fromkeys(inner, "")
    names = {
        "phi/kernel": "key.weight",
        "phi/bias": "key.bias",
        "psi/kernel": "query.weight",
        "psi/bias": "query.bias",
        "h/kernel": "out.weight",
        "h_bias": "out.bias",
        "g/kernel": "decoder_weight",
        "g_bias": "decoder_bias",
        "decoder_LN/scale": "decoder_norm_weight",
        "decoder_LN/bias": "decoder_norm_bias",
        **inner,
    }
    found: Moved = []
    for theirs, ours in names.items():
        source = f"{layer}/{theirs}"
        if source not in arrays:
            continue
        array = np.asarray(arrays[source])
        if theirs in ("phi/kernel", "psi/kernel"):
            array = array.transpose(0, 2, 1).reshape(-1, array.shape[1])
        elif theirs == "h/kernel":
            array = array.reshape(-1, array.shape[-1]).T
        elif theirs in ("phi/bias", "psi/bias", "g_bias", "h_bias"):
            array = array.reshape(-1)
        found.append((source, ours, array))
    return found


def _initial_weights_matter(arrays: Arrays) -> bool:
    """Whether any layer's W0 is other than a linear learner's zero."""
    return any(
        "/inner_Dense_1/" in name or ("/inner_Dense_0/" in name and bool(np.any(array)))
        for name, array in arrays.items()
    ) or any("/inner_Dense_0/bias" in name for name in arrays)


def _flat(parameters: Arrays) -> dict[str, Any]:
    """Flat names without ``params/`` above them and without the optimizer's state."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}/{key}" if prefix else str(key), inner)
        elif not _is_optimizer_s(prefix):
            found[prefix.removeprefix("params/")] = value

    walk("", parameters)
    return found


def _is_optimizer_s(name: str) -> bool:
    return name.startswith("opt/")


def _under(arrays: Arrays, prefix: str) -> list[str]:
    return [name for name in arrays if name.startswith(prefix)]


def _get(arrays: Arrays, name: str) -> NDArray[Any]:
    if name not in arrays:
        raise ModelError(
            f"expected the parameters of MTTT's JAX code, with {name}, found {len(arrays)} arrays "
            f"({', '.join(sorted(arrays)[:3]) or 'none'}, …)"
        )
    return np.asarray(arrays[name])


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # NumPy knows bfloat16, which JAX saves, as two nameless bytes.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        wide = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16
        array = wide.view(np.float32)
    kind = np.float64 if array.dtype == np.float64 else np.float32
    return torch.from_numpy(np.array(array, dtype=kind, order="C"))
