"""Plain fast weights against gradient descent written out token by token with autograd."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.plain import PLAIN, plain_fast_weights
from ttt_adapt.kernels.inner_loop.state import FastWeightState

HEADS, WIDTH, HIDDEN = 2, 5, 7


def problem(length: int, size: int, kind: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {
        "ttt-linear": ((HEADS, WIDTH, WIDTH),),
        "ttt-mlp": ((HEADS, WIDTH, HIDDEN), (HEADS, HIDDEN, WIDTH)),
    }
    tokens = {name: normal(2, length, HEADS, WIDTH) for name in ("q", "k", "v")}
    return {
        **tokens,
        "lr": 0.1 * normal(2, length, HEADS).sigmoid(),
        "inner": PLAIN[kind],
        "weights": tuple(0.5 * normal(*shape) for shape in shapes[kind]),
        "token_scale": normal(size).sigmoid(),
    }


def answer(kind: str, weights: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
    """``f(x)`` for ``x [H, D]``."""
    z = torch.einsum("hd,hde->he", x, weights[0])
    if kind == "ttt-linear":
        return z
    return torch.einsum("hf,hfe->he", functional.gelu(z, approximate="tanh"), weights[1])


def token_by_token(kind: str, values: dict[str, Any]) -> torch.Tensor:
    """The equations, one token after the other."""
    q, k, v, lr = (values[name] for name in ("q", "k", "v", "lr"))
    size = values["token_scale"].shape[0]
    rows = []
    for row in range(q.shape[0]):
        start, answers = values["weights"], []
        total: list[torch.Tensor] = []
        for token in range(q.shape[1]):
            position = token % size
            if position == 0:
                total = [torch.zeros_like(weight) for weight in start]
            at = tuple(weight.detach().requires_grad_() for weight in start)
            used = start if start[0].requires_grad else at
            error = answer(kind, used, k[row, token]) - v[row, token]
            loss = (0.5 * error.square().sum(-1) * lr[row, token]).sum()
            gradients = torch.autograd.grad(loss, used, create_graph=True)
            total = [t + g for t, g in zip(total, gradients, strict=True)]
            scale = values["token_scale"][position]
            now = tuple(w - scale * t for w, t in zip(used, total, strict=True))
            answers.append(answer(kind, now, q[row, token]))
            if position == size - 1:
                start = now
        rows.append(torch.stack(answers))
    return torch.stack(rows)


def learnable(values: dict[str, Any]) -> list[torch.Tensor]:
    leaves = [values[name] for name in ("q", "k", "v", "lr", "token_scale")] + [*values["weights"]]
    return [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("kind", ["ttt-linear", "ttt-mlp"])
@pytest.mark.parametrize(("length", "size"), [(1, 4), (4, 4), (11, 4), (6, 1), (3, 8)])
def test_outputs_and_all_gradients(kind: str, length: int, size: int) -> None:
    values = problem(length, size, kind)
    expected_leaves = learnable(values)
    expected = token_by_token(kind, values)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = torch.autograd.grad((expected * weight).sum(), expected_leaves)
    other = problem(length, size, kind)
    before = {name: other[name].clone() for name in ("q", "k", "v", "lr", "token_scale")}
    leaves = learnable(other)
    out, state = plain_fast_weights(**other)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    assert state is None
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(other[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["ttt-linear", "ttt-mlp"])
@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 8), (5,), (3, 10)])
def test_going_on_at_any_offset(kind: str, cuts: tuple[int, ...]) -> None:
    values = problem(11, 4, kind)
    whole, _ = plain_fast_weights(**values)
    parts, state = [], None
    for first, last in zip((0, *cuts), (*cuts, 11), strict=True):
        piece = {name: values[name][:, first:last] for name in ("q", "k", "v", "lr")}
        out, state = plain_fast_weights(
            **(values | piece), initial_state=state, output_final_state=True
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["ttt-linear", "ttt-mlp"])
def test_padding_changes_nothing(kind: str) -> None:
    values = problem(9, 4, kind)
    expected, after = plain_fast_weights(**values, output_final_state=True)
    real = torch.tensor([0, 0, 0] + [1] * 5 + [0] + [1] * 4).bool()
    padded = dict(values)
    for name in ("q", "k", "v", "lr"):
        # Finite, but absurd where nobody may look.
        wide = torch.full((2, 13, *values[name].shape[2:]), 1e6, dtype=torch.float64)
        wide[:, real] = values[name]
        padded[name] = wide
    mask = real.expand(2, -1)
    out, state = plain_fast_weights(**padded, attention_mask=mask, output_final_state=True)
    torch.testing.assert_close(out[:, real], expected, rtol=1e-10, atol=1e-10)
    assert bool((out[:, ~real] == 0).all())
    assert state is not None and after is not None
    torch.testing.assert_close(state.tensors(), after.tensors())


def test_one_step_with_rate_one_remembers_a_key_of_length_one() -> None:
    values = problem(6, 1, "ttt-linear")
    key = functional.normalize(values["k"], dim=-1)
    values |= {"k": key, "q": key, "lr": torch.ones(2, 6, HEADS), "token_scale": torch.ones(1)}
    out, _ = plain_fast_weights(**values)
    torch.testing.assert_close(out, values["v"])


def test_a_state_of_another_layer() -> None:
    values = problem(5, 4, "ttt-linear")
    _, state = plain_fast_weights(**values, output_final_state=True)
    other = problem(5, 4, "ttt-mlp")
    with pytest.raises(OperatorInputError, match="ttt-mlp: expected a state with weights"):
        plain_fast_weights(**other, initial_state=state)
    shorter = problem(5, 3, "ttt-linear")
    with pytest.raises(OperatorInputError, match="mini-batches of 3, found"):
        plain_fast_weights(**shorter, initial_state=state)
    assert isinstance(state, FastWeightState) and state.num_rows == 2
