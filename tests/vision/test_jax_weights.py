"""Checkpoints of MTTT's JAX code: the same numbers as that code's, and as a plain NumPy reference.

Shape legend: B images, T tokens, D width, N heads, d head width.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.vision.inner_loop.descent import partition
from ttt_adapt.vision.jax_weights import (
    architecture_of,
    convert_jax_weights,
    load_jax_checkpoint,
    model_from_jax,
)
from ttt_adapt.vision.mixers import MTTT

Array = NDArray[Any]

DIM, HEADS, DEPTH, PATCH, CLASSES = 12, 3, 2, 56, 5
WIDTH, HIDDEN, TOKENS = DIM // HEADS, 4 * DIM, (224 // PATCH) ** 2

LOGITS = {
    "mlp": [
        [-0.3910392865647794, -0.13431530660433091, 0.42565086207584127, 0.02462976646307652,
         -0.43199768168505237],
        [-0.3897371988837714, -0.13458734220765065, 0.4244188749744135, 0.025219271576546215,
         -0.4309176035599839],
    ],
    "linear": [
        [-0.07324710868671058, 0.38545040222319354, -0.02607921561420451, -0.37873007552832294,
         0.12367378572609748],
        [-0.07426594085715152, 0.3891192783586922, -0.02600581242438632, -0.3824178668575652,
         0.12455068575404635],
    ],
    "attention": [
        [-0.4599099562073805, 0.08927970682638726, 0.4369035588535874, -0.20186494301919278,
         -0.38488518585497866],
        [-0.45752818117700267, 0.08812767862170892, 0.43481864880610155, -0.2001756564530745,
         -0.38323558635415633],
    ],
    "linear_attention": [
        [-0.3918027230513257, -0.04667532171115456, 0.4038304394952428, -0.057387335804647,
         -0.3890423549737956],
        [-0.39207934166307656, -0.06329936467893336, 0.4083908909256549, -0.04193847095348987,
         -0.3975838087625817],
    ],
    "elu": [
        [-0.22969044948780315, 0.12738672398278603, 0.19686429342475298, -0.17811648464510005,
         -0.15096563664516666],
        [-0.2365913831381633, 0.11848979622247659, 0.206057867391235, -0.17158863966175036,
         -0.16184136438308702],
    ],
}  # fmt: skip
"""Of the public code at 5a617dc, run with jax 0.10.2 and flax 0.12.8 in float64 on :func:`weights` and
:func:`images`."""

INNER_LOSSES = {
    "mlp": [[9.071824142915382, 4.629412981106613, 4.518353958020933],
            [6.525634288514135, 1.9769448889498444, 1.8166602371350278]],
    "linear": [[3.03840292994418, 3.005538021409876], [5.8708571561881975, 5.190670336997993]],
}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    "mlp": {"steps": 2, "eta": (1.0, 0.5)},
    "linear": {},
    "attention": {},
    "linear_attention": {"num_heads": HEADS},
    "elu": {"num_heads": HEADS, "feature_map": "elu"},
}


def images() -> Array:
    """``[2, 224, 224, 3]``."""
    wave = np.cos(0.1 * np.arange(2 * 224 * 224 * 3) ** 1.1)
    return np.asarray(wave.reshape(2, 224, 224, 3))


def names(kind: str) -> dict[str, tuple[int, ...]]:
    """The code's parameters and their shapes."""
    found: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (PATCH, PATCH, 3, DIM), "embedding/bias": (DIM,),
        "Transformer/encoder_norm/scale": (DIM,), "Transformer/encoder_norm/bias": (DIM,),
        "pre_logits/kernel": (DIM, DIM), "pre_logits/bias": (DIM,),
        "head/kernel": (DIM, CLASSES), "head/bias": (CLASSES,),
    }  # fmt: skip
    if kind == "linear":
        found["pos_embedding"] = (1, TOKENS, DIM)
    for block in (f"Transformer/encoderblock_{index}/" for index in range(DEPTH)):
        for norm in ("LayerNorm_0/", "LayerNorm_1/"):
            found |= {block + norm + "scale": (DIM,), block + norm + "bias": (DIM,)}
        dense = block + "MlpBlock_0/Dense_"
        found |= {
            dense + "0/kernel": (DIM, HIDDEN), dense + "0/bias": (HIDDEN,),
            dense + "1/kernel": (HIDDEN, DIM), dense + "1/bias": (DIM,),
        }  # fmt: skip
        if kind in ("mlp", "linear"):
            found |= {block + "TTTLayer_0/" + name: shape for name, shape in layer(kind).items()}
        elif kind == "attention":
            mixer = block + "MultiHeadDotProductAttention_0/"
            for name in ("query", "key", "value"):
                found |= {
                    f"{mixer}{name}/kernel": (DIM, HEADS, WIDTH),
                    f"{mixer}{name}/bias": (HEADS, WIDTH),
                }
            found |= {mixer + "out/kernel": (HEADS, WIDTH, DIM), mixer + "out/bias": (DIM,)}
        else:
            for name in ("query", "key", "value", "proj"):
                mixer = f"{block}LinearAttention_0/{name}/"
                found |= {mixer + "kernel": (DIM, DIM), mixer + "bias": (DIM,)}
    return found


def layer(kind: str) -> dict[str, tuple[int, ...]]:
    """Of a TTT layer."""
    shared: dict[str, tuple[int, ...]] = {
        "phi/kernel": (HEADS, DIM, WIDTH), "phi/bias": (HEADS, WIDTH),
        "psi/kernel": (HEADS, DIM, WIDTH), "psi/bias": (HEADS, WIDTH),
        "g/kernel": (HEADS, WIDTH, DIM), "g_bias": (1, DIM),
        "h/kernel": (HEADS, WIDTH, DIM), "h_bias": (1, DIM),
    }  # fmt: skip
    if kind == "linear":
        return {**shared, "inner_Dense_0/kernel": (HEADS, WIDTH, WIDTH)}
    return {
        **shared,
        "inner_Dense_0/kernel": (HEADS, WIDTH, 4 * WIDTH), "inner_Dense_0/bias": (HEADS, 4 * WIDTH),
        "inner_Dense_1/kernel": (HEADS, 4 * WIDTH, WIDTH), "inner_Dense_1/bias": (HEADS, WIDTH),
        "decoder_LN/scale": (HEADS, DIM), "decoder_LN/bias": (HEADS, DIM),
    }  # fmt: skip


def weights(kind: str) -> dict[str, Array]:
    """A sine for each parameter; the linear learner's W0 is zero, as the code sets it."""
    found: dict[str, Array] = {}

    def place(item: tuple[str, tuple[int, ...]]) -> str:
        """The order of flax's own names, in which those of a TTT layer have strokes themselves."""
        above, layer_name, inside = item[0].partition("TTTLayer_0/")
        return f"{above}{layer_name}".replace("/", "|") + inside

    ordered = sorted(names(kind).items(), key=place)
    for index, (name, shape) in enumerate(ordered):
        wave = 0.3 * np.sin(1.7 * np.arange(math.prod(shape)) + index).reshape(shape)
        if "scale" in name:
            wave = 1 + wave
        if name == "embedding/kernel":
            wave = wave / 50
        if kind == "linear" and "inner_Dense" in name:
            wave = np.zeros(shape)
        found[name] = wave
    return found


@pytest.mark.parametrize("kind", sorted(LOGITS))
def test_logits_are_the_public_code_s(kind: str) -> None:
    arrays = weights(kind)
    model = model_from_jax(arrays, **OVERRIDES[kind]).double()
    # Not by way of float32.
    model.load_state_dict(convert_jax_weights(arrays))
    tokens = torch.from_numpy(images()).permute(0, 3, 1, 2)
    losses: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, MTTT):
            module.recorder = losses.append
    with torch.no_grad():
        logits = model(tokens)
    # The sine and cosine positions are float32 in both.
    torch.testing.assert_close(logits, torch.tensor(LOGITS[kind]).double(), rtol=0, atol=3e-7)
    for found, wanted in zip(losses, INNER_LOSSES.get(kind, []), strict=True):
        expected = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found.sum(-1).mean(-1), expected, rtol=1e-6, atol=0)


def reference_layer(
    arrays: dict[str, Array], tokens_BTD: Array, etas: list[float], orders: list[Array] | None
) -> tuple[Array, Array]:
    """The code's TTT layer in NumPy, image by image and head by head, gradients by the chain rule.

    Returns:
        Outputs ``[B, T, D]``, and the losses ``[S + 1]`` over all tokens, summed over heads.
    """
    mlp = "inner_Dense_1/kernel" in arrays
    out = np.zeros_like(tokens_BTD) + arrays["h_bias"]
    losses = np.zeros((len(tokens_BTD), len(etas) + 1))

    def gelu(x: Array) -> tuple[Array, Array]:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        tanh = np.tanh(inner)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope

    def encode(w: list[Array], x: Array) -> Array:
        if not mlp:
            return np.asarray(x @ w[0])
        return np.asarray(gelu(x @ w[0] + w[1])[0] @ w[2] + w[3])

    for image, x in enumerate(tokens_BTD):
        for h in range(HEADS):
            part = {name: array[h] for name, array in arrays.items() if array.shape[0] == HEADS}
            keys = ["inner_Dense_0/kernel"]
            if mlp:
                keys += ["inner_Dense_0/bias", "inner_Dense_1/kernel", "inner_Dense_1/bias"]
            w = [part[name] for name in keys]
            g = part["g/kernel"]

            def loss_and_gradient(
                w: list[Array], x: Array, part: dict[str, Array] = part, g: Array = g
            ) -> tuple[float, list[Array]]:
                k = x @ part["phi/kernel"] + part["phi/bias"]
                shown = encode(w, k) @ g + arrays["g_bias"]
                if mlp:
                    mean, std = shown.mean(-1, keepdims=True), None
                    std = np.sqrt(((shown - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
                    normal = (shown - mean) / std
                    final = normal * part["decoder_LN/scale"] + part["decoder_LN/bias"]
                else:
                    final = shown
                rest = final - x
                loss = 0.5 * (rest**2).mean() * HEADS
                d = rest / rest.size * HEADS
                if mlp:
                    d = d * part["decoder_LN/scale"]
                    d = (
                        d
                        - d.mean(-1, keepdims=True)
                        - normal * (d * normal).mean(-1, keepdims=True)
                    )
                    d = d / std
                d = d @ g.T
                if not mlp:
                    return float(loss), [k.T @ d]
                hidden, slope = gelu(k @ w[0] + w[1])
                back = (d @ w[2].T) * slope
                return float(loss), [k.T @ back, back.sum(0), hidden.T @ d, d.sum(0)]

            losses[image, 0] += loss_and_gradient(w, x)[0]
            for step, eta in enumerate(etas):
                seen = x if orders is None else x[orders[step][h]]
                w = [a - eta * b for a, b in zip(w, loss_and_gradient(w, seen)[1], strict=True)]
                losses[image, step + 1] += loss_and_gradient(w, x)[0]
            answers = encode(w, x @ part["psi/kernel"] + part["psi/bias"])
            out[image] += answers @ part["h/kernel"]
    return out, losses.mean(0)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("strategy", ["full", "sgd"])
def test_layer_against_numpy(kind: str, steps: int, strategy: str) -> None:
    """In float64; SGD's mini-batches as this library draws them (the code's are JAX's own)."""
    block = "Transformer/encoderblock_1/TTTLayer_0/"
    every = weights(kind)
    arrays = {name.removeprefix(block): a for name, a in every.items() if name.startswith(block)}
    state = convert_jax_weights(every)
    mixer = MTTT(DIM, HEADS, learner=kind, steps=steps, strategy=strategy, eta=0.7).double().eval()
    mixer.load_state_dict(
        {
            name.removeprefix("blocks.1.mixer."): tensor
            for name, tensor in state.items()
            if name.startswith("blocks.1.mixer.")
        }
    )
    orders = None
    if strategy == "sgd" and steps > 1:
        drawn = partition(
            TOKENS, HEADS, steps, torch.Generator().manual_seed(0), torch.device("cpu")
        )
        orders = [part.numpy() for part in drawn]
    tokens = np.random.default_rng(0).normal(size=(2, TOKENS, DIM))
    wanted, losses = reference_layer(arrays, tokens, [0.7] * steps, orders)
    with torch.no_grad():
        found = mixer(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-11)
    shown = mixer.inner_losses(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(shown, losses, rtol=1e-10)


def nested(flat: dict[str, Array]) -> dict[str, Any]:
    """As flax holds it: ``phi/kernel`` is one name there."""
    found: dict[str, Any] = {}
    for name, array in flat.items():
        *above, last = name.split("/")
        place = found
        for part in above:
            place = place.setdefault(part, {})
        place[last] = array
    return found


def test_files_and_nested_parameters(tmp_path: Path) -> None:
    """``.npz`` below ``params/`` with an optimizer's state beside it; nested; all the same."""
    arrays = {name: array.astype(np.float32) for name, array in weights("mlp").items()}
    path = tmp_path / "checkpoint.npz"
    moments: Any = {f"opt/0/mu/{name}": array for name, array in arrays.items()}
    saved: Any = {f"params/{name}": array for name, array in arrays.items()}
    np.savez(path, **saved, **moments)
    loaded = load_jax_checkpoint(path, steps=2).state_dict()
    assert not load_jax_checkpoint(path).training
    for other in (arrays, nested(arrays), {"params": nested(arrays)}):
        state = model_from_jax(other, steps=2).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in loaded.items())
    assert loaded["blocks.0.mixer.inner.w1"].dtype == torch.float32


def test_what_shapes_tell() -> None:
    found = architecture_of(weights("mlp"))
    assert found == {
        "name": "vit_tiny_mttt_mlp", "patch_size": PATCH, "in_channels": 3, "dim": DIM,
        "depth": DEPTH, "num_classes": CLASSES, "mlp_ratio": 4.0, "num_heads": HEADS,
        "decoder_norm": True, "learner_bias": True, "initial": "learned",
    }  # fmt: skip
    linear = architecture_of(weights("linear"))
    assert (linear["initial"], linear["position"], linear["image_size"]) == ("zero", "learned", 224)
    moved = weights("linear")
    moved["Transformer/encoderblock_1/TTTLayer_0/inner_Dense_0/kernel"][0, 0, 0] = 1.0
    assert architecture_of(moved)["initial"] == "learned"
    state = model_from_jax(moved).state_dict()
    assert float(state["blocks.1.mixer.inner.weight"].sum()) == 1.0


def test_bfloat16_as_numpy_saves_it() -> None:
    arrays = weights("attention")
    kernel = torch.from_numpy(arrays["head/kernel"]).bfloat16()
    arrays["head/kernel"] = kernel.view(torch.uint16).numpy().view("V2")
    assert torch.equal(convert_jax_weights(arrays)["head.weight"], kernel.float().T)


def test_mistakes_are_named(tmp_path: Path) -> None:
    arrays = weights("mlp")
    with pytest.raises(ModelError, match="no such checkpoint"):
        load_jax_checkpoint(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ModelError, match="an .npz of arrays alone"):
        load_jax_checkpoint(tmp_path / "text.npz")
    np.savez(tmp_path / "objects.npz", thing=np.array([{}], dtype=object))
    with pytest.raises(ModelError, match="an .npz of arrays alone"):
        load_jax_checkpoint(tmp_path / "objects.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ModelError, match="an .npz of arrays alone"):
        load_jax_checkpoint(tmp_path / "one.npy")
    with pytest.raises(ModelError, match=r"with embedding/kernel, found 1 arrays \(a, …\)"):
        model_from_jax({"a": np.zeros(3)})
    with pytest.raises(ModelError, match=r"found besides \['extra/kernel'\]"):
        model_from_jax({**arrays, "extra/kernel": np.zeros(3)})
    without = {name: a for name, a in arrays.items() if not name.startswith("pre_logits")}
    with pytest.raises(ModelError, match=r"found none for \['pre_logits.0.bias', 'pre_logits.0"):
        model_from_jax(without)
    with pytest.raises(ModelError, match="expected one of MultiHeadDotProductAttention_0"):
        model_from_jax({name: a for name, a in arrays.items() if "TTTLayer" not in name})
    with pytest.raises(ModelError, match=r"head.weight: expected \[7, 12\], found \[5, 12\]"):
        model_from_jax(arrays, num_classes=7)
    with pytest.raises(SettingsError, match="stepz"):
        model_from_jax(arrays, stepz=2)
