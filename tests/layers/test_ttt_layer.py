"""TTT layers: positions, parts, padding, precision and gradients against slow obvious forms."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError, OperatorInputError
from ttt_adapt.layers import (
    TTTMLP,
    ShortConvolution,
    TTTLinear,
    TTTState,
    convolution_tail,
    rotary_angles,
    rotate_pairs,
)

KINDS = [TTTLinear, TTTMLP]


def make_layer(kind: Any, *, mamba: bool = False, backend: str = "auto") -> Any:
    torch.manual_seed(0)
    layer = kind(16, 2, mini_batch_size=4, use_gate=mamba, share_qk=mamba, backend=backend)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.double()


def some_hidden(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 16, generator=generator, dtype=torch.float64)


def slow_rotation(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    found = x.clone()
    width = x.shape[-1]
    for pair in range(width // 2):
        angle = position * theta ** (-2 * pair / width)
        one, other = x[2 * pair], x[2 * pair + 1]
        found[2 * pair] = one * math.cos(angle) - other * math.sin(angle)
        found[2 * pair + 1] = one * math.sin(angle) + other * math.cos(angle)
    return found


def test_rotation_is_of_interleaved_pairs() -> None:
    x = torch.randn(2, 3, 2, 8)
    position = torch.tensor([[0, 1, 2], [5, 700, 3]])
    found = rotate_pairs(x, rotary_angles(position, 8, 100.0))
    for row in range(2):
        for token in range(3):
            for head in range(2):
                expected = slow_rotation(x[row, token, head], int(position[row, token]), 100.0)
                torch.testing.assert_close(found[row, token, head], expected, rtol=1e-4, atol=1e-4)
    half = rotate_pairs(x.bfloat16(), rotary_angles(position, 8, 100.0))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, rotate_pairs(x.bfloat16().float(), rotary_angles(position, 8, 100.0)).bfloat16())  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_equations(kind: Any) -> None:
    """The whole layer written out, around the operator's own per-token reference."""
    layer, hidden = make_layer(kind, backend="reference"), some_hidden(1, 7)
    q, k, v = (hidden @ getattr(layer, f"{name}_proj").weight.T for name in "qkv")
    rotated = []
    for tensor in (q, k):
        heads = tensor.view(7, 2, 8)
        rows = [[slow_rotation(heads[t, h], t % 4, 10_000.0) for h in range(2)] for t in range(7)]
        rotated.append(torch.stack([torch.stack(row) for row in rows])[None])
    gate = torch.sigmoid(hidden @ layer.lr_weight.T + layer.lr_bias)
    scale = (1 / torch.arange(1, 5) + layer.token_scale_offset).clamp(min=0)
    out, _ = layer._operate(
        *rotated, v.view(1, 7, 2, 8), layer.base_lr * gate / 8, token_scale=scale,
        ln_weight=layer.norm_weight, ln_bias=layer.norm_bias, mini_batch_size=4,
        backend="reference",
    )  # fmt: skip
    normal = functional.layer_norm(out.reshape(1, 7, 16), (16,), eps=1e-6)
    expected = (normal * layer.post_norm.weight + layer.post_norm.bias) @ layer.o_proj.weight.T
    # Rotary tables are float32 in every layer.
    torch.testing.assert_close(layer(hidden)[0], expected, rtol=1e-6, atol=1e-6)


def test_default_rates() -> None:
    assert TTTLinear(16, 2).base_lr == 1.0
    assert TTTMLP(16, 2).base_lr == 0.1
    layer = make_layer(TTTLinear)
    hidden = some_hidden(1, 3)
    before = layer.learning_rates(hidden)
    layer.base_lr = 0.25
    torch.testing.assert_close(layer.learning_rates(hidden), before / 4)
    layer.token_scale_offset.data[1] = -3.0
    assert layer.token_scale().tolist()[1] == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mamba", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (4, 8), (3, 5, 6, 16), tuple(range(1, 19))])
def test_any_cutting_gives_the_whole(kind: Any, mamba: bool, cuts: tuple[int, ...]) -> None:
    layer, hidden = make_layer(kind, mamba=mamba), some_hidden(2, 19)
    kept = hidden.clone()
    whole, expected = layer(hidden, return_state=True)
    state, parts = None, []
    for part in torch.tensor_split(hidden, cuts, dim=1):
        out, state = layer(part, state=state, return_state=True)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-8, atol=1e-10)
    assert state is not None and state.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(state.tensors()[name], tensor, rtol=1e-8, atol=1e-10)
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mamba", [False, True])
def test_padding_anywhere_is_as_if_it_were_not_there(kind: Any, mamba: bool) -> None:
    layer, hidden, more = make_layer(kind, mamba=mamba), some_hidden(4, 11), some_hidden(4, 6, 2)
    mask = torch.ones(4, 11)
    mask[0, :6], mask[1, 9:], mask[2, [0, 3, 4, 9]] = 0, 0, 0
    hidden[0, :6] = torch.nan  # padding may hold anything
    out, state = layer(hidden, attention_mask=mask, return_state=True)
    later, _ = layer(more, state=state)
    for row in range(4):
        kept = mask[row].bool()
        alone, ended = layer(hidden[row : row + 1, kept], return_state=True)
        torch.testing.assert_close(out[row : row + 1, kept], alone, rtol=1e-8, atol=1e-10)
        assert not bool(out[row, ~kept].any())
        expected, _ = layer(more[row : row + 1], state=ended)
        torch.testing.assert_close(later[row : row + 1], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mamba", [False, True])
def test_a_row_of_padding_alone(mamba: bool) -> None:
    layer, hidden = make_layer(TTTLinear, mamba=mamba), some_hidden(2, 5)
    mask = torch.tensor([[0.0] * 5, [1.0] * 5])
    out, state = layer(hidden, attention_mask=mask, return_state=True)
    assert not bool(out[0].any()) and state.fast.num_open.tolist() == [0, 1]
    torch.testing.assert_close(state.fast.weights[0][0], layer.initial_weight)
    fresh, _ = layer(hidden[1:])
    later, _ = layer(hidden[[1, 1]], state=state)
    torch.testing.assert_close(later[:1], fresh, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mamba", [False, True])
def test_all_gradients(kind: Any, mamba: bool) -> None:
    layer, hidden = make_layer(kind, mamba=mamba), some_hidden(2, 9).requires_grad_()
    slow = make_layer(kind, mamba=mamba, backend="reference")
    mask = torch.ones(2, 9)
    mask[0, :2] = 0
    gradients = []
    for one in (layer, slow):
        out, _ = one(hidden, attention_mask=mask)
        names = [name for name, _ in one.named_parameters()]
        found = torch.autograd.grad(out.square().sum(), [hidden, *one.parameters()])
        gradients.append(dict(zip(["hidden", *names], found, strict=True)))
    for name, gradient in gradients[1].items():
        assert bool(gradient.any()), name
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-7, atol=1e-9, msg=name)


def test_states_select_clone_and_name_their_tensors() -> None:
    layer, hidden = make_layer(TTTLinear, mamba=True), some_hidden(3, 6)
    _, state = layer(hidden, return_state=True)
    chosen = state.select(torch.tensor([2, 0, 2, 1]))
    assert chosen.num_rows == 4 and chosen.tail.shape == (4, 3, 16)
    again = TTTState.from_tensors(state.detach().clone().to("cpu").tensors())
    for name, tensor in state.tensors().items():
        assert torch.equal(again.tensors()[name], tensor)
        assert torch.equal(chosen.tensors()[name][0], tensor[2])
    assert "tail" not in TTTState(state.fast).tensors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keeps_float32_states(kind: Any, dtype: torch.dtype) -> None:
    layer, hidden = make_layer(kind, mamba=True), some_hidden(2, 9)
    expected, _ = layer(hidden)
    half = make_layer(kind, mamba=True).to(dtype)
    out, state = half(hidden.to(dtype), return_state=True)
    assert out.dtype == dtype and state.tail.dtype == dtype
    assert all(tensor.dtype == torch.float32 for tensor in state.fast.weights)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)
    single = make_layer(kind, mamba=True).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, state = single(hidden.float(), return_state=True)
    assert all(tensor.dtype == torch.float32 for tensor in state.fast.weights)
    assert (out.double() - expected).abs().max() / expected.abs().max() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row(kind: Any) -> None:
    layer, hidden = make_layer(kind), some_hidden(3, 9)
    expected, after = layer(hidden, return_state=True)
    hidden[1, 5] = torch.inf
    out, state = layer(hidden, return_state=True)
    assert bool(out[1, 5:].isnan().all()) and bool(state.fast.weights[0][1].isnan().all())
    for row in (0, 2):
        torch.testing.assert_close(out[row], expected[row], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(state.fast.weights[0][row], after.fast.weights[0][row])
    out, _ = layer(hidden)
    assert bool(out.sum().isnan())


def slow_convolution(module: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight[:, None]
    padded = functional.pad(x.transpose(1, 2), (module.num_taps - 1, 0))
    return functional.conv1d(padded, weight, module.bias, groups=x.shape[2]).transpose(1, 2)


@pytest.mark.parametrize("num_taps", [1, 2, 4])
def test_short_convolution(num_taps: int) -> None:
    module = ShortConvolution(6, num_taps).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    expected = slow_convolution(module, x)
    torch.testing.assert_close(module(x), expected)
    tail, parts = None, []
    for part in torch.tensor_split(x, (1, 2, 7), dim=1):
        parts.append(module(part, tail))
        tail = convolution_tail(part, tail, num_taps, None)
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    ragged = convolution_tail(x, None, num_taps, torch.tensor([0, 5]))
    assert not bool(ragged[0].any())
    assert torch.equal(ragged[1], x[1, 5 - (num_taps - 1) : 5])


def test_refusals() -> None:
    with pytest.raises(ModelError, match=r"a multiple of 2 · num_heads \(6\), found 16"):
        TTTLinear(16, 3)
    with pytest.raises(ModelError, match="mini_batch_size of at least 1, found 0"):
        TTTMLP(16, 2, mini_batch_size=0)
    layer, hidden = make_layer(TTTLinear), some_hidden(2, 5)
    with pytest.raises(OperatorInputError, match=r"attention_mask \[2, 5\], found \[2, 4\]"):
        layer(hidden, attention_mask=torch.ones(2, 4))
    with pytest.raises(OperatorInputError, match="at least one row, token, head and dimension"):
        layer(hidden[:, :0])
    _, state = make_layer(TTTMLP)(hidden, return_state=True)
    with pytest.raises(OperatorInputError, match="expected a state of ttt_linear, found one of 4"):
        layer(hidden, state=state)
    with pytest.raises(OperatorInputError, match="expected a backend of"):
        make_layer(TTTLinear, backend="cuda")(hidden)
