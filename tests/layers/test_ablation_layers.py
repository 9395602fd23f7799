"""What the ladder to TTT-Linear is made of: linear attention, plain inner models, fixed rates."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError, OperatorInputError
from ttt_adapt.layers import (
    TTTMLP,
    LinearAttention,
    LinearAttentionState,
    TTTLinear,
    TTTPlainLinear,
    diagnose,
)

WIDTH, HEADS = 16, 2


def make(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(WIDTH, HEADS, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.double()


def some_hidden(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)


LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear attention": (LinearAttention, {}),
    "with features": (LinearAttention, {"feature_map": "elu"}),
    "plain": (TTTPlainLinear, {"mini_batch_size": 4}),
    "plain, nothing learned": (
        TTTPlainLinear, {"mini_batch_size": 32, "learnable_w0": False, "learnable_lr": False}
    ),
    "plain, mamba": (TTTPlainLinear, {"mini_batch_size": 4, "use_gate": True, "share_qk": True}),
    "fixed rate": (TTTLinear, {"mini_batch_size": 4, "learnable_lr": False}),
    "fixed rate, mlp": (TTTMLP, {"mini_batch_size": 4, "learnable_lr": False}),
}  # fmt: skip


@pytest.mark.parametrize("feature_map", ["identity", "elu"])
def test_linear_attention_is_its_sum(feature_map: Any) -> None:
    """Katharopoulos et al. 2020, equations 5 and 9, a token at a time."""
    layer, length = make(LinearAttention, feature_map=feature_map), 40
    hidden = some_hidden(1, length)
    # As rotated by the layer with the pair written as one complex number.
    q, k, v = (hidden @ getattr(layer, f"{name}_proj").weight.T for name in "qkv")
    shape = (length, HEADS, WIDTH // HEADS)
    turn = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    spin = torch.polar(torch.ones_like(turn), turn.float())[:, None].to(torch.complex128)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(*shape[:2], -1, 2).contiguous())
        return torch.view_as_real(pairs * spin).flatten(2)

    q, k, v = rotated(q), rotated(k), v.view(shape)
    if feature_map == "elu":
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
    rows = []
    for t in range(length):
        weights = torch.einsum("hd,shd->hs", q[t], k[: t + 1])
        found = torch.einsum("hs,shd->hd", weights, v[: t + 1])
        rows.append(found / weights.sum(1, keepdim=True) if feature_map == "elu" else found)
    normal = layer.post_norm(torch.stack(rows).flatten(1))
    torch.testing.assert_close(layer(hidden)[0][0], layer.o_proj(normal), rtol=1e-5, atol=1e-6)


def test_one_plain_mini_batch_from_zero_is_linear_attention() -> None:
    """Sun et al. 2024, theorem 1, outputs and gradients; the paper's η = ½ is base_lr = 1."""
    attention = make(LinearAttention)
    ttt = TTTPlainLinear(
        WIDTH, HEADS, mini_batch_size=24, learnable_w0=False, learnable_lr=False
    ).double()
    ttt.load_state_dict(attention.state_dict())
    results = []
    for layer in (attention, ttt):
        hidden = some_hidden(2, 24).requires_grad_()
        out = layer(hidden)[0]
        out.square().sum().backward()
        gradients = [hidden.grad, *(p.grad for p in layer.parameters())]
        results.append([out, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_parts_are_the_whole(name: str) -> None:
    kind, options = LAYERS[name]
    layer, hidden = make(kind, **options), some_hidden(2, 19)
    whole, last = layer(hidden, return_state=True)
    for cut in (1, 4, 7, 18):
        first, state = layer(hidden[:, :cut], return_state=True)
        second, after = layer(hidden[:, cut:], state=state, return_state=True)
        torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-9, atol=1e-11)
    for key, tensor in last.tensors().items():
        torch.testing.assert_close(after.tensors()[key], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_as_if_it_were_not_there(name: str) -> None:
    kind, options = LAYERS[name]
    layer, hidden = make(kind, **options), some_hidden(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, [0, 1, 5, 11]] = False
    filled = torch.where(mask[..., None], hidden, 1e3)
    out, state = layer(filled, attention_mask=mask, return_state=True)
    alone, expected = layer(hidden[:1, mask[0]], return_state=True)
    torch.testing.assert_close(out[0, mask[0]], alone[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(out[1], layer(hidden)[0][1], rtol=1e-9, atol=1e-11)
    assert not out[0, ~mask[0]].any()
    for key, tensor in expected.tensors().items():
        torch.testing.assert_close(state.tensors()[key][:1], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_nan_spreads_within_its_row_only(name: str) -> None:
    kind, options = LAYERS[name]
    layer, hidden = make(kind, **options), some_hidden(3, 12)
    expected, _ = layer(hidden)
    hidden[1, 5] = torch.inf
    out, state = layer(hidden, return_state=True)
    assert bool(out[1, 5:].isnan().any(-1).all())
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], rtol=1e-9, atol=1e-11)
    # From such a state it goes on; what loops look for is a loss of NaN.
    assert bool(layer(hidden[:, :2], state=state)[0][1].isnan().any())


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_learns_and_is_saved(name: str) -> None:
    kind, options = LAYERS[name]
    layer, hidden = make(kind, **options), some_hidden(2, 12)
    out = layer(hidden)[0]
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    other = kind(WIDTH, HEADS, **options).double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(hidden)[0], out)


@pytest.mark.parametrize("kind", [TTTLinear, TTTMLP, TTTPlainLinear])
def test_fixed_rates_are_what_learned_ones_begin_with(kind: Any) -> None:
    learned = kind(WIDTH, HEADS, mini_batch_size=4)
    fixed = kind(WIDTH, HEADS, mini_batch_size=4, learnable_lr=False)
    names = {"lr_weight", "lr_bias", "token_scale_offset"}
    state = learned.state_dict()
    assert set(state) - set(fixed.state_dict()) == names
    fixed.load_state_dict({name: t for name, t in state.items() if name not in names})
    torch.nn.init.zeros_(learned.lr_weight)
    hidden = some_hidden(2, 9).float()
    torch.testing.assert_close(fixed(hidden)[0], learned(hidden)[0])
    rate = {TTTLinear: 1.0 / 16, TTTMLP: 0.1 / 16, TTTPlainLinear: 1.0}[kind]
    torch.testing.assert_close(fixed.learning_rates(hidden), torch.full((2, 9, HEADS), rate))
    assert fixed.learning_rates(hidden.bfloat16()).dtype == torch.float32
    expected = torch.ones(4) if kind is TTTPlainLinear else 1 / torch.arange(1.0, 5.0)
    torch.testing.assert_close(fixed.token_scale(), expected)


def test_plain_layers_are_diagnosed() -> None:
    layer, hidden = make(TTTPlainLinear, mini_batch_size=4), some_hidden(1, 8)
    layer.base_lr = 1e-3
    k, v = (
        layer._project(hidden, None)[i].view(1, 8, HEADS, -1)[:, :4].transpose(1, 2) for i in (1, 2)
    )
    with diagnose(layer) as diagnosis:
        layer(hidden)
    found = diagnosis.layers[0]
    assert found.kind == "ttt_plain_linear" and found.num_tokens == 8 and found.is_finite
    assert found.loss_after < found.loss_before
    with diagnose(layer) as diagnosis:
        layer(hidden[:, :1])
    # The first token is not rotated.
    error = (k @ layer.initial_weight - v)[:, :, 0]
    expected = 0.5 * error.detach().square().sum(-1).mean()
    assert diagnosis.layers[0].loss_before == pytest.approx(float(expected))


def test_states_of_linear_attention_move_as_others_do() -> None:
    layer, hidden = make(LinearAttention), some_hidden(3, 5)
    _, state = layer(hidden, return_state=True)
    again = LinearAttentionState.from_tensors(state.tensors()).select(torch.tensor([2, 2]))
    out, _ = layer(hidden[:2], state=again.clone().detach().to("cpu"))
    expected, _ = layer(torch.cat([hidden[[2, 2]], hidden[:2]], 1))
    torch.testing.assert_close(out, expected[:, 5:], rtol=1e-9, atol=1e-11)


def test_mistakes() -> None:
    with pytest.raises(ModelError, match=r"multiple of 2 · num_heads \(6\), found 16"):
        LinearAttention(16, 3)
    with pytest.raises(ModelError, match="feature_map of identity, elu, found 'relu'"):
        LinearAttention(16, 2, feature_map="relu")  # type: ignore[arg-type]
    with pytest.raises(OperatorInputError, match=r"attention_mask \[1, 4\], found \[1, 3\]"):
        make(LinearAttention)(some_hidden(1, 4), attention_mask=torch.ones(1, 3))
