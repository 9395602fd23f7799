"""Diagnosis of inner loops, against losses computed token by token."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.layers import TTTMLP, InnerTokens, TTTLinear, diagnose
from ttt_adapt.testing import tiny_ttt_model

KINDS = [TTTLinear, TTTMLP]


def make_layer(kind: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(16, 2, mini_batch_size=4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.double()


def slow_losses(layer: Any, tokens: InnerTokens) -> tuple[float, float]:
    """One row, one head, one token at a time, by autograd."""
    _, length, heads, width = tokens.q.shape
    scale = layer.token_scale()
    before, after = 0.0, 0.0
    for head in range(heads):
        weights = [w[head].detach().clone() for w in layer.initial_weights().values()]

        def loss(parameters: list[torch.Tensor], token: int, head: int = head) -> torch.Tensor:
            z = tokens.k[0, token, head] @ parameters[0] + parameters[1]
            if len(parameters) == 4:
                z = functional.gelu(z, approximate="tanh") @ parameters[2] + parameters[3]
            normal = functional.layer_norm(z, (width,), eps=1e-6)
            found = normal * layer.norm_weight[head] + layer.norm_bias[head]
            target = tokens.v[0, token, head] - tokens.k[0, token, head]
            error: torch.Tensor = found - target
            return 0.5 * error.square().sum()

        for first in range(0, length, 4):
            part = range(first, min(first + 4, length))
            start = [w.clone().requires_grad_() for w in weights]
            weighted: Any = sum(loss(start, t) * tokens.lr[0, t, head].detach() for t in part)
            before += sum(float(loss(weights, t).detach()) for t in part)
            gradients = torch.autograd.grad(weighted, start)
            weights = [
                (w - scale[len(part) - 1] * g).detach()
                for w, g in zip(start, gradients, strict=True)
            ]
            after += sum(float(loss(weights, t).detach()) for t in part)
    return before / (length * heads), after / (length * heads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [3, 4, 10])
def test_losses_equal_slow_ones(kind: Any, length: int) -> None:
    layer = make_layer(kind)
    hidden = torch.randn(1, length, 16, dtype=torch.float64)
    seen: list[InnerTokens] = []
    layer.probe = lambda _, tokens, __: seen.append(tokens)
    layer(hidden)
    layer.probe = None
    before, after = slow_losses(layer, seen[0])
    with diagnose(layer) as diagnosis:
        layer(hidden)
    (found,) = diagnosis.layers
    assert found.kind == layer.kind and found.num_tokens == length and found.is_finite
    assert found.loss_before == pytest.approx(before, rel=1e-6)
    assert found.loss_after == pytest.approx(after, rel=1e-6)
    assert found.mean_lr == pytest.approx(float(seen[0].lr.detach().mean()), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_padding_are_as_the_whole(kind: Any) -> None:
    layer = make_layer(kind)
    hidden = torch.randn(2, 16, 16, dtype=torch.float64)
    with diagnose(layer) as whole:
        layer(hidden)
    with diagnose(layer) as parts:
        # Cut where mini-batches end: every token counts.
        _, state = layer(hidden[:, :8], return_state=True)
        layer(hidden[:, 8:], state=state)
    for name in ("loss_before", "loss_after", "mean_lr", "state_norm", "num_tokens"):
        one, other = (getattr(d.layers[0], name) for d in (whole, parts))
        assert one == pytest.approx(other, rel=1e-6), name
    padded = torch.cat([torch.randn(2, 3, 16, dtype=torch.float64), hidden], 1)
    mask = torch.ones(2, 19)
    mask[:, :3] = 0
    with diagnose(layer) as ragged:
        layer(padded, attention_mask=mask)
    assert ragged.layers[0].loss_after == pytest.approx(whole.layers[0].loss_after, rel=1e-6)


def test_tokens_that_complete_an_open_mini_batch_are_not_counted() -> None:
    layer = make_layer(TTTLinear)
    hidden = torch.randn(2, 13, 16, dtype=torch.float64)
    mask = torch.ones(2, 6)
    mask[0, :4] = 0
    # Rows have read 2 and 6 tokens: both lack 2 of a mini-batch.
    _, state = layer(hidden[:, :6], attention_mask=mask, return_state=True)
    with diagnose(layer) as diagnosis:
        layer(hidden[:, 6:], state=state)
    assert diagnosis.layers[0].num_tokens == 2 * (7 - 2)
    with diagnose(layer) as diagnosis:
        layer(hidden[:, :1], state=state)
    (found,) = diagnosis.layers
    assert found.num_tokens == 0 and found.loss_before != found.loss_before
    assert found.mean_lr > 0 and found.state_norm > 0 and found.is_finite


def test_a_whole_model_and_nothing_left_behind() -> None:
    model = tiny_ttt_model(layer_types=["ttt_linear", "ttt_mlp"])
    tokens = torch.randint(2, 258, (2, 11))
    expected = model(input_ids=tokens).logits
    with diagnose(model) as diagnosis:
        assert torch.equal(model(input_ids=tokens).logits, expected)
    first, second = diagnosis.layers
    assert (first.name, second.name) == ("model.layers.0.mixer", "model.layers.1.mixer")
    assert (first.kind, second.kind) == ("ttt_linear", "ttt_mlp")
    assert diagnosis.is_finite and first.num_tokens == 22
    assert all(block.mixer.probe is None for block in model.model.layers)
    with torch.no_grad():
        model.model.layers[1].mixer.q_proj.weight.fill_(torch.nan)
    with diagnose(model) as diagnosis:
        model(input_ids=tokens)
    assert [layer.is_finite for layer in diagnosis.layers] == [True, False]
    assert not diagnosis.is_finite
    with pytest.raises(ModelError, match="a model with TTT layers to diagnose, found none"):
        diagnose(torch.nn.Linear(2, 2)).__enter__()


def test_the_step_helps() -> None:
    """With small rates every inner step lowers the loss it descends on."""
    model = tiny_ttt_model(base_lr=0.05)
    with diagnose(model) as diagnosis:
        model(input_ids=torch.randint(2, 258, (2, 40)))
    assert all(layer.loss_after < layer.loss_before for layer in diagnosis.layers)
