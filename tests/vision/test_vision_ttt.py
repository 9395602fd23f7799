"""The Vittt block against algorithm 1 written out token by token, and what may be left out of it."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import SettingsError
from ttt_adapt.vision.models import DESIGN_ROUTE, VisionTTT, VisionTTTSettings, create_model
from ttt_adapt.vision.models.inner_learner import InitialState, InnerLearner
from ttt_adapt.vision.models.layout import TokenLayout
from ttt_adapt.vision.models.vittt_block import DualTTT, VitttBlock

TINY: dict[str, Any] = {
    "dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "image_size": (12, 20),
    "in_channels": 1, "num_classes": 3, "mini_batch_size": 4,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    **DESIGN_ROUTE,
    "rope": {"rope": True},
    "logistic gate": {"gate_activation": "sigmoid"},
    "mean": {"merge": "mean"},
    "normed residual": {"residual": "normed"},
    "shared W0": {"initial_weights": "shared"},
    "frozen W0": {"initial_weights": "frozen"},
    "no scale": {"token_scale": "one", "base_lr": 0.5},
    "1/i": {"token_scale": "reciprocal", "post_norm": False},
    "class token": {"pool": "mid_token"},
    "two class tokens": {"pool": "double_token"},
}


def tiny(seed: int = 0, **overrides: Any) -> VisionTTT:
    """A model whose parameters are all large enough to matter."""
    torch.manual_seed(seed)
    model = create_model("vision_ttt_tiny", **{**TINY, **overrides})
    assert isinstance(model, VisionTTT)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.add_(0.2 * torch.randn_like(tensor))
            if name.endswith("initial.both.weight") or "initial.forth" in name:
                tensor.add_(0.1)
    return model


def mixer_of(model: VisionTTT) -> DualTTT:
    block = model.blocks[0]
    assert isinstance(block, VitttBlock)
    return block.mixer


def slow_learner(
    learner: InnerLearner, x_SD: torch.Tensor, initial: InitialState, options: VisionTTTSettings
) -> torch.Tensor:
    """Lines 9 to 16 of algorithm 1 for one image, one token after the other."""
    length, dim = x_SD.shape
    width, size = dim // options.num_heads, options.mini_batch_size
    q = x_SD @ learner.q_proj.weight.T
    k = q if learner.k_proj is None else x_SD @ learner.k_proj.weight.T
    v = x_SD @ learner.v_proj.weight.T

    def convolve(rows: torch.Tensor, conv: Any) -> torch.Tensor:
        out = []
        for t in range(length):
            token = conv.bias.clone()
            for back in range(4):
                if t - back >= 0:
                    token = token + conv.weight[:, 3 - back] * rows[t - back]
            out.append(token)
        return torch.stack(out)

    if options.conv1d:
        q, k = convolve(q, learner.q_conv), convolve(k, learner.k_conv)
    outputs = []
    for head in range(options.num_heads):
        part = slice(head * width, (head + 1) * width)
        weight, bias = initial.weight[head], initial.bias[head]
        gamma, beta = learner.norm_weight[head], learner.norm_bias[head]
        lr = learner.lr_proj.weight[head], learner.lr_proj.bias[head]
        answers: list[torch.Tensor] = []
        for first in range(0, length, size):
            sum_w, sum_b = torch.zeros_like(weight), torch.zeros_like(bias)
            for place, t in enumerate(range(first, min(first + size, length))):
                turned = [turn(row[t, part], place) if options.rope else row[t, part] for row in (q, k)]  # fmt: skip
                query, key = turned
                fast = [tensor.detach().requires_grad_() for tensor in (weight, bias)]
                norm = functional.layer_norm(key @ fast[0] + fast[1], (width,), gamma, beta, 1e-6)
                loss = 0.5 * (norm - (v[t, part] - key)).square().sum()
                found = torch.autograd.grad(loss, fast)
                rate = options.base_lr / width * torch.sigmoid(lr[0] @ x_SD[t] + lr[1])
                sum_w, sum_b = sum_w + rate * found[0], sum_b + rate * found[1]
                scale: Any = 1.0
                if options.token_scale != "one":
                    scale = torch.tensor(1.0 / (place + 1), dtype=x_SD.dtype)
                    if learner.token_scale_offset is not None:
                        scale = (scale + learner.token_scale_offset[place]).clamp(min=0)
                z = query @ (weight - scale * sum_w) + bias - scale * sum_b
                answers.append(query + functional.layer_norm(z, (width,), gamma, beta, 1e-6))
            weight, bias = weight - scale * sum_w, bias - scale * sum_b
        outputs.append(torch.stack(answers))
    out = torch.cat(outputs, dim=1)
    normed: torch.Tensor = learner.post_norm(out)
    return normed


def turn(x: torch.Tensor, position: int) -> torch.Tensor:
    pairs = torch.view_as_complex(x.reshape(-1, 2))
    angle = position * 10_000.0 ** (-torch.arange(len(pairs)) * 2 / len(x))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten().to(x.dtype)


def slow_block(
    block: VitttBlock, y_SD: torch.Tensor, layout: TokenLayout, options: VisionTTTSettings
) -> torch.Tensor:
    """The whole block for one image."""
    if options.dwconv:
        assert block.dwconv is not None
        kernel, grid = block.dwconv.conv.weight[:, 0], {}
        image = [s for s in range(len(y_SD)) if s not in layout.class_positions]
        for token, s in enumerate(image):
            grid[divmod(token, layout.width)] = y_SD[s]
        after = list(y_SD)
        for token, s in enumerate(image):
            row, column = divmod(token, layout.width)
            for i in range(3):
                for j in range(3):
                    near = grid.get((row + i - 1, column + j - 1))
                    if near is not None:
                        after[s] = after[s] + kernel[:, i, j] * near
        y_SD = torch.stack(after)
    x = block.norm1(y_SD)
    mixer = block.mixer
    directions: Any = mixer.directions
    merged = slow_learner(directions["forth"], x, mixer.initial_of("forth"), options)
    if options.dual:
        back = slow_learner(directions["back"], x.flip(0), mixer.initial_of("back"), options)
        merged = merged + back.flip(0)
        if options.merge == "mean":
            merged = merged / 2
    if mixer.gate_proj is not None:
        gate = x @ mixer.gate_proj.weight.T
        sigmoid = options.gate_activation == "sigmoid"
        merged = merged * (gate.sigmoid() if sigmoid else functional.gelu(gate, approximate="tanh"))
    y = (x if options.residual == "normed" else y_SD) + merged @ mixer.out_proj.weight.T
    h, mlp = block.norm2(y), block.mlp
    hidden = functional.silu(h @ mlp.gate_proj.weight.T) * (h @ mlp.up_proj.weight.T)
    found: torch.Tensor = y + hidden @ mlp.down_proj.weight.T
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_is_algorithm_1(variant: str) -> None:
    model = tiny(depth=1, **VARIANTS[variant]).double().eval()
    options = model.settings
    assert isinstance(options, VisionTTTSettings)
    images = torch.randn(2, 1, 8, 20, dtype=torch.float64)
    tokens, layout = model.embed(images)
    expected = tokens
    for block in model.blocks:
        assert isinstance(block, VitttBlock)
        expected = torch.stack([slow_block(block, row, layout, options) for row in expected])
    torch.testing.assert_close(
        model.forward_features(images), model.norm(expected), rtol=1e-9, atol=1e-9
    )


def test_backends_agree_in_values_and_gradients() -> None:
    images = torch.randn(2, 1, 12, 20, dtype=torch.float64)
    found = []
    for backend in ("reference", "chunked"):
        model = tiny(backend=backend).double()
        model(images).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None and bool(gradient.any()) for gradient in found[0].values())
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)


def test_directions_are_each_others_mirror() -> None:
    """With the two directions' weights exchanged, a sequence turned round gives the answer turned
    round: nothing but the direction tells them apart."""
    mixer, mirrored = (mixer_of(tiny(dwconv=False).double().eval()) for _ in range(2))
    swap = {"forth": "back", "back": "forth"}
    swapped = {
        ".".join(swap.get(part, part) for part in name.split(".")): tensor
        for name, tensor in mixer.state_dict().items()
    }
    mirrored.load_state_dict(swapped)
    x, layout = torch.randn(2, 11, 16, dtype=torch.float64), TokenLayout(1, 11)
    torch.testing.assert_close(mirrored(x.flip(1), layout).flip(1), mixer(x, layout))


def test_one_direction_is_causal_two_are_not() -> None:
    x, layout = torch.randn(1, 11, 16), TokenLayout(1, 11)
    other = x.clone()
    other[:, -1] += 1.0
    for dual in (False, True):
        mixer = mixer_of(tiny(dual=dual, dwconv=False).eval())
        changed = (mixer(other, layout) - mixer(x, layout))[:, :-1].abs().max()
        assert (changed > 1e-4) == dual
        assert dual or changed == 0


def test_learned_initial_weights_are_parameters_and_frozen_ones_are_kept() -> None:
    names = {
        kind: {name for name, _ in tiny(initial_weights=kind).named_parameters() if ".initial." in name}
        for kind in ("separate", "shared", "frozen")
    }  # fmt: skip
    block = "blocks.0.mixer.initial"
    assert {name for name in names["separate"] if name.startswith("blocks.0")} == {
        f"{block}.{direction}.{part}" for direction in ("forth", "back") for part in ("weight", "bias")
    }  # fmt: skip
    assert {name for name in names["shared"] if name.startswith("blocks.0")} == {
        f"{block}.both.weight",
        f"{block}.both.bias",
    }
    assert names["frozen"] == set()
    kept = tiny(initial_weights="frozen").state_dict()
    assert not torch.equal(kept[f"{block}.forth.weight"], kept[f"{block}.back.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_stays_finite(dtype: torch.dtype) -> None:
    model = tiny(depth=4, merge="mean" if dtype == torch.float16 else "sum")
    images = 3 * torch.randn(2, 1, 12, 20)
    exact = model(images).detach()
    with torch.autocast("cpu", dtype=dtype):
        logits = model(images)
        loss: Any = functional.cross_entropy(logits, torch.tensor([0, 2]))
    loss.backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1 * float(exact.abs().max()))


def test_a_model_in_half_precision() -> None:
    model = tiny().bfloat16().eval()
    logits = model(torch.randn(2, 1, 12, 20, dtype=torch.bfloat16))
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mini_batch_sise": 4}, "unknown setting mini_batch_sise; did you mean mini_batch_size?"),
        ({"num_heads": 5}, r"expected dim to be a multiple of num_heads \(5\), found 16"),
        ({"dim": 6, "num_heads": 2, "rope": True}, "for rope, found 6"),
        ({"initial_weights": "zero"}, "initial_weights: .*'separate', 'shared' or 'frozen'"),
        ({"mini_batch_size": 0}, "mini_batch_size: .*greater than or equal to 1"),
    ],
)
def test_mistakes(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^vision_ttt_tiny: .*{message}"):
        create_model("vision_ttt_tiny", **{**TINY, **overrides})
