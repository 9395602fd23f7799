"""The TTT operators under torch's counter: their formula, whatever computes; nothing changed else.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch.
"""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ttt_adapt.kernels.inner_loop.counting import inner_loop_macs
from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.kernels.ttt_mlp import ttt_mlp

BATCH, HEADS, WIDTH, SIZE = 2, 3, 4, 8


def run_operator(kind: str, num_tokens: int, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Leaves, and a call on them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(*shape, generator=generator)).requires_grad_()

    q, k, v = (draw(BATCH, num_tokens, HEADS, WIDTH) for _ in range(3))
    lr = draw(BATCH, num_tokens, HEADS)
    shared = {"token_scale": torch.ones(SIZE), "ln_weight": draw(HEADS, WIDTH),
              "ln_bias": draw(HEADS, WIDTH), "mini_batch_size": SIZE}  # fmt: skip
    hidden = 4 * WIDTH
    if kind == "linear":
        weights = {"weight": draw(HEADS, WIDTH, WIDTH), "bias": draw(HEADS, WIDTH)}
    else:
        weights = {"w1": draw(HEADS, WIDTH, hidden), "b1": draw(HEADS, hidden),
                   "w2": draw(HEADS, hidden, WIDTH), "b2": draw(HEADS, WIDTH)}  # fmt: skip
    operator: Any = ttt_linear if kind == "linear" else ttt_mlp

    def call() -> torch.Tensor:
        out: torch.Tensor = operator(q, k, v, lr, **weights, **shared, **options)[0]
        return out

    leaves = [q, k, v, lr, *weights.values()]
    return leaves, call


def macs_by_hand(kind: str, num_tokens: int) -> int:
    """Mini-batch by mini-batch, product by product."""
    found, hidden = 0, 4 * WIDTH
    for first in range(0, num_tokens, SIZE):
        n = min(SIZE, num_tokens - first)
        layers = [(WIDTH, WIDTH)] if kind == "linear" else [(WIDTH, hidden), (hidden, WIDTH)]
        for into, out in layers:
            found += n * into * out  # keys
            found += n * into * out  # queries
            found += n * into * out  # fold
            found += n * n * into + n * n * out  # scores, and their product with gradients
        if kind == "mlp":
            found += n * WIDTH * hidden  # back through the second layer
    return HEADS * found


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("num_tokens", [1, 8, 21])
def test_counter_knows_the_operator(kind: str, num_tokens: int) -> None:
    wanted = macs_by_hand(kind, num_tokens)
    hidden = 4 * WIDTH if kind == "mlp" else 0
    assert inner_loop_macs(num_tokens, HEADS, WIDTH, SIZE, hidden) == wanted
    leaves, call = run_operator(kind, num_tokens, backend="chunked")
    plain = call()
    gradients = torch.autograd.grad(plain.square().sum(), leaves)
    with FlopCounterMode(display=False) as counter:
        out = call()
        forward = counter.get_total_flops()
        counted = torch.autograd.grad(out.square().sum(), leaves)
    assert forward == 2 * BATCH * wanted
    assert counter.get_total_flops() == 3 * forward
    assert torch.equal(out, plain)
    for one, other in zip(counted, gradients, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.ttt_adapt.inner_loop: 2 * BATCH * wanted}


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_reference_still_runs_under_a_counter(kind: str) -> None:
    _, call = run_operator(kind, 5, backend="reference")
    plain = call()
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(call(), plain)
    assert counter.get_total_flops() > 0


def test_layers_are_counted() -> None:
    """A language model's TTT layer: its projections, and the operator's formula."""
    from ttt_adapt.layers import TTTLinear

    layer = TTTLinear(16, 2, mini_batch_size=4)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.randn(3, 10, 16))
    per_row = 4 * 10 * 16 * 16 + 10 * 16 * 2 + inner_loop_macs(10, 2, 8, 4)
    assert counter.get_total_flops() == 2 * 3 * per_row
