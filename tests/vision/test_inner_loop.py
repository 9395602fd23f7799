"""Inner loops against autograd in the slow, obvious form; gradients, dtypes, orders, mistakes.

Shape legend: B images, N heads, T tokens, d head width, D width.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ttt_adapt.errors import OperatorInputError, SettingsError
from ttt_adapt.vision.inner_loop import PRESETS, Decoder, Norm, mttt, preset
from ttt_adapt.vision.inner_loop import descent as descent_module
from ttt_adapt.vision.inner_loop.descent import partition
from ttt_adapt.vision.inner_loop.second_order import gelu_backward, layer_norm_backward


class Problem:
    """Drawn inputs of every kind: ``q, k [B, N, T, d]``, tokens, values, weights, norms, decoder."""

    def __init__(
        self, batch: int = 2, heads: int = 2, tokens: int = 9, width: int = 4, dim: int = 8
    ) -> None:
        self.generator = torch.Generator().manual_seed(11)
        draw = self.draw
        self.q, self.k, self.values = (draw(batch, heads, tokens, width) for _ in range(3))
        self.tokens, self.rates = draw(batch, tokens, dim), draw(batch, heads, tokens).sigmoid()
        self.decoder = Decoder(
            draw(heads, width, dim, scale=0.5),
            draw(dim),
            Norm(1 + draw(heads, dim, scale=0.2), draw(heads, dim, scale=0.2)),
        )
        self.feature_norm = Norm(1 + draw(heads, width, scale=0.2), draw(heads, width, scale=0.2))
        hidden = 4 * width
        self.linear = (draw(heads, width, width, scale=0.5), draw(heads, width, scale=0.5))
        self.mlp = (
            draw(heads, width, hidden, scale=0.5),
            draw(heads, hidden, scale=0.5),
            draw(heads, hidden, width, scale=0.3),
            draw(heads, width, scale=0.5),
        )

    def draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def weights(self, learner: str, *, biased: bool) -> tuple[torch.Tensor, ...]:
        found = self.linear if learner == "linear" else self.mlp
        return found if biased else found[::2]

    def decoder_with(self, *, bias: bool, norm: bool) -> Decoder:
        g = self.decoder
        return Decoder(g.weight, g.bias if bias else None, g.norm if norm else None)


def plain_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-6)


def plain_model(weights: list[torch.Tensor], x: torch.Tensor, *, mlp: bool) -> torch.Tensor:
    """One head's learner on ``[T, d]``."""
    if not mlp:
        return x @ weights[0] + (weights[1] if len(weights) == 2 else 0)
    biased = len(weights) == 4
    hidden = x @ weights[0] + (weights[1] if biased else 0)
    hidden = functional.gelu(hidden, approximate="tanh")
    return hidden @ weights[2 if biased else 1] + (weights[3] if biased else 0)


def plain_mttt(
    problem: Problem,
    weights: tuple[torch.Tensor, ...],
    *,
    learner: str,
    etas: list[float],
    divisor: float,
    decoder: Decoder | None,
    residual: bool,
    norm: Norm | None,
    weighted: bool,
    orders: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Image by image, head by head, ``torch.autograd.grad`` for each step: outputs, losses."""
    outputs, losses = [], []
    for image in range(problem.q.shape[0]):
        for head in range(problem.q.shape[1]):
            current = [w[head].clone().requires_grad_() for w in weights]

            def features(
                x: torch.Tensor, current: list[torch.Tensor], head: int = head
            ) -> torch.Tensor:
                found = plain_model(current, x, mlp=learner == "mlp")
                if norm is not None:
                    found = plain_layer_norm(found, norm.weight[head], norm.bias[head])
                return x + found if residual else found

            def token_losses(
                current: list[torch.Tensor], image: int = image, head: int = head
            ) -> torch.Tensor:
                found = features(problem.k[image, head], current)
                target = problem.values[image, head]
                if decoder is not None:
                    target = problem.tokens[image]
                    found = found @ decoder.weight[head]
                    if decoder.bias is not None:
                        found = found + decoder.bias
                    if decoder.norm is not None:
                        scale, shift = decoder.norm.weight[head], decoder.norm.bias[head]
                        found = plain_layer_norm(found, scale, shift)
                return 0.5 * (found - target).square().sum(-1)

            history = [token_losses(current).mean()]
            for index, eta in enumerate(etas):
                chosen = torch.arange(problem.q.shape[2]) if orders is None else orders[index][head]
                each = token_losses(current)
                if weighted:
                    each = each * problem.rates[image, head]
                loss = each[chosen].sum() / len(chosen) / divisor
                found = torch.autograd.grad(loss, current)
                current = [
                    (w - eta * g).detach().requires_grad_()
                    for w, g in zip(current, found, strict=True)
                ]
                history.append(token_losses(current).mean())
            outputs.append(features(problem.q[image, head], current).detach())
            losses.append(torch.stack(history).detach() / divisor)
    out = torch.stack(outputs).view(problem.q.shape)
    return out, torch.stack(losses, 1).view(len(etas) + 1, *problem.q.shape[:2])


@pytest.mark.parametrize("learner", ["linear", "mlp"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("decoded", ["norm", "affine", "bare", "values"])
@pytest.mark.parametrize("residual", [True, False])
def test_full_batch_against_autograd(
    learner: Any, biased: bool, decoded: str, residual: bool
) -> None:
    problem = Problem()
    weights = problem.weights(learner, biased=biased)
    decoder = None
    if decoded != "values":
        decoder = problem.decoder_with(bias=decoded != "bare", norm=decoded == "norm")
    norm = problem.feature_norm if residual and learner == "mlp" else None
    etas = [0.5, 0.25, 0.125]
    wanted, wanted_losses = plain_mttt(
        problem, weights, learner=learner, etas=etas, divisor=4.0, decoder=decoder,
        residual=residual, norm=norm, weighted=True,
    )  # fmt: skip
    for closed_form in (True, False):
        losses: list[torch.Tensor] = []
        found = mttt(
            problem.q, problem.k, problem.values if decoder is None else problem.tokens, weights,
            learner=learner, steps=3, eta=etas, normalizer="n*d", decoder=decoder,
            residual=residual, feature_norm=norm, rates=problem.rates, closed_form=closed_form,
            recorder=losses.append,
        )  # fmt: skip
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(losses[0], wanted_losses)


@pytest.mark.parametrize("learner", ["linear", "mlp"])
@pytest.mark.parametrize("norm", [True, False])
def test_sgd_against_autograd(learner: Any, norm: bool) -> None:
    """Parts of 3, 2, 2 and 2 tokens, each head in its own order."""
    problem = Problem()
    weights = problem.weights(learner, biased=True)
    decoder = problem.decoder_with(bias=True, norm=norm)
    orders = partition(9, 2, 4, torch.Generator().manual_seed(3), torch.device("cpu"))
    wanted, _ = plain_mttt(
        problem, weights, learner=learner, etas=[0.3] * 4, divisor=1.0, decoder=decoder,
        residual=False, norm=None, weighted=False, orders=list(orders),
    )  # fmt: skip
    found = mttt(
        problem.q, problem.k, problem.tokens, weights, learner=learner, strategy="sgd", steps=4,
        eta=0.3, decoder=decoder, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    torch.testing.assert_close(found, wanted)


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    num_batches=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_partition_is_one(num_tokens: int, num_batches: int, seed: int) -> None:
    """Every token once, parts of equal size but for one; the generator alone decides."""
    device = torch.device("cpu")
    parts = partition(num_tokens, 3, num_batches, torch.Generator().manual_seed(seed), device)
    assert torch.equal(
        torch.cat(list(parts), 1).sort(dim=1).values, torch.arange(num_tokens).expand(3, -1)
    )
    sizes = [part.shape[1] for part in parts]
    assert max(sizes) - min(sizes) <= 1
    again = partition(num_tokens, 3, num_batches, torch.Generator().manual_seed(seed), device)
    assert all(torch.equal(one, two) for one, two in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 2},
        {"steps": 2, "closed_form": False},
        {"learner": "mlp", "steps": 2},
        {"learner": "mlp", "strategy": "sgd", "steps": 3},
        {"learner": "mlp", "strategy": "minibatch", "mini_batch_size": 4},
        {"strategy": "online"},
    ],
)
@pytest.mark.parametrize("decoded", ["norm", "values"])
def test_outer_gradients_are_the_numerical_ones(options: dict[str, Any], decoded: str) -> None:
    """By everything: inputs, W0, decoder, norms, rates."""
    problem = Problem(batch=1, tokens=5)
    learner = options.get("learner", "linear")
    weights = problem.weights(learner, biased=True)
    norm = problem.feature_norm if learner == "mlp" else None
    g = problem.decoder
    assert g.bias is not None and g.norm is not None

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, target, rates, scale, shift, weight, bias, ln_weight, ln_bias, *start = tensors
        decoder = Decoder(weight, bias, Norm(ln_weight, ln_bias)) if decoded == "norm" else None
        return mttt(
            q, k, target, start, decoder=decoder, rates=rates, residual=norm is not None,
            feature_norm=None if norm is None else Norm(scale, shift),
            generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip

    target = problem.tokens if decoded == "norm" else problem.values
    inputs = (problem.q, problem.k, target, problem.rates, *problem.feature_norm, g.weight, g.bias,
              *g.norm, *weights)  # fmt: skip
    inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True)


def test_second_order_operations_are_pytorch_s() -> None:
    """Values and both gradients, at a large epsilon as well, where no term vanishes."""
    generator = torch.Generator().manual_seed(2)
    u, z, v = (torch.randn(3, 5, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    u, z = u.requires_grad_(), (2 * z).requires_grad_()
    for epsilon in (1e-6, 0.5):
        _, mean, rstd = (t.detach() for t in torch.native_layer_norm(z, [7], None, None, epsilon))
        ours = layer_norm_backward(u, z, mean, rstd)
        normed = functional.layer_norm(z, (7,), eps=epsilon)
        (theirs,) = torch.autograd.grad(normed, z, u, create_graph=True)
        torch.testing.assert_close(ours, theirs)
        found, wanted = (torch.autograd.grad(out, (u, z), v) for out in (ours, theirs))
        torch.testing.assert_close(found, wanted)
    ours = gelu_backward(u, z)
    (theirs,) = torch.autograd.grad(functional.gelu(z, approximate="tanh"), z, u, create_graph=True)
    torch.testing.assert_close(ours, theirs)
    found, wanted = (torch.autograd.grad(out, (u, z), v) for out in (ours, theirs))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_blocks_change_nothing(learner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in blocks, computed again in the backward: the same values and gradients."""
    problem = Problem()
    weights = problem.weights(learner, biased=True)
    found = []
    for largest in (1 << 24, 2 * 2 * 16 * 4):
        monkeypatch.setattr(descent_module, "LARGEST_BLOCK", largest)
        k = problem.k.clone().requires_grad_()
        losses: list[torch.Tensor] = []
        out = mttt(
            problem.q, k, problem.tokens, weights, learner=learner, steps=2,
            decoder=problem.decoder, rates=problem.rates, recorder=losses.append,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(out.square().sum(), k)
        with torch.no_grad():
            quiet = mttt(
                problem.q, k, problem.tokens, weights, learner=learner, steps=2,
                decoder=problem.decoder, rates=problem.rates,
            )  # fmt: skip
        torch.testing.assert_close(quiet, out)
        found.append((out, gradient, losses[0]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("learner", ["linear", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_the_plain_form_s(learner: Any, dtype: torch.dtype) -> None:
    """Against float64; in half precision inputs are rounded, arithmetic is not."""
    problem = Problem(tokens=64, width=16, dim=32)
    weights = problem.weights(learner, biased=True)
    options: dict[str, Any] = {"learner": learner, "steps": 3, "eta": 0.2}
    small = [tensor.to(dtype) for tensor in (problem.q, problem.k, problem.values, *weights)]
    q, k, v, *start = small
    wide_q, wide_k, wide_v = (tensor.double() for tensor in (q, k, v))
    exact = mttt(wide_q, wide_k, wide_v, [w.double() for w in start], **options)
    fast = mttt(q, k, v, start, **options)
    one_q, one_k, one_v, *one_start = (tensor.float() for tensor in small)
    plain = mttt(one_q, one_k, one_v, one_start, closed_form=False, **options).to(dtype)
    assert fast.dtype == dtype
    error, allowed = ((found.double() - exact).abs().max() for found in (fast, plain))
    assert error <= 2 * allowed


def test_autocast_and_inputs_are_left_alone() -> None:
    problem = Problem()
    q, k, v = (tensor.float() for tensor in (problem.q, problem.k, problem.values))
    weights = [tensor.float() for tensor in problem.mlp]
    before = [tensor.clone() for tensor in (q, k, v, *weights)]
    plain = mttt(q, k, v, weights, learner="mlp", steps=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = mttt(q, k, v, weights, learner="mlp", steps=2)
    assert torch.equal(plain, cast)
    assert all(map(torch.equal, before, (q, k, v, *weights)))


def test_causal_losses_are_of_the_weights_before_the_mini_batch() -> None:
    problem = Problem()
    weights = problem.weights("linear", biased=False)
    losses: list[torch.Tensor] = []
    options: dict[str, Any] = {"strategy": "minibatch", "mini_batch_size": 4, "normalizer": "1"}
    mttt(problem.q, problem.k, problem.values, weights, eta=0.1, recorder=losses.append, **options)
    assert losses[0].shape == (9, 2, 2)
    weight = weights[0].expand(2, -1, -1, -1)
    for first in range(0, 9, 4):
        k, v = problem.k[:, :, first : first + 4], problem.values[:, :, first : first + 4]
        rest = k @ weight - v
        wanted = 0.5 * rest.square().sum(-1).permute(2, 0, 1)
        torch.testing.assert_close(losses[0][first : first + 4], wanted)
        weight = weight - 0.1 * k.mT @ rest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": "fulll"},
            "expected a strategy of full, sgd, minibatch, online, found 'fulll'",
        ),
        ({"normalizer": "d"}, "expected a normalizer of n, n\\*d, 1, found 'd'"),
        ({"learner": "cnn"}, "expected a learner of linear, mlp, found 'cnn'"),
        ({"learner": "mlp"}, "expected weights for the learner 'mlp', found none"),
        ({"steps": -1}, "expected steps of at least 0, found -1"),
        ({"mini_batch_size": 0}, "expected a mini_batch_size of at least 1, found 0"),
        ({"steps": 2, "eta": (1.0,)}, "one eta, or one for each of 2 steps, found 1"),
        ({"strategy": "sgd", "steps": 10}, "at most 9 steps of SGD for 9 tokens, found 10"),
        ({"rates": torch.ones(2, 9)}, r"expected rates \[2, 2, 9\], found \[2, 9\]"),
        ({"keys": torch.ones(2, 2, 9, 3)}, r"expected keys \[2, 2, 9, 4\], found \[2, 2, 9, 3\]"),
        ({"queries": torch.ones(2, 9, 4)}, r"expected queries \[B, N, T, d\]"),
        ({"weights": (torch.ones(1), torch.ones(1), torch.ones(1))}, "with biases 2, found 3"),
        ({"weights": (torch.ones(2, 4, 5),)}, r"weight \[2, 4, 4\] in layer 1 .*found \[2, 4, 5\]"),
        (
            {"learner": "mlp", "weights": (torch.ones(2, 4, 7), torch.ones(2, 6, 4))},
            r"expected weight \[2, 7, 4\] in layer 2 of the learner, found \[2, 6, 4\]",
        ),
        ({"weights": (torch.ones(2, 4, 4), torch.ones(4))}, r"expected bias \[2, 4\] in layer 1"),
        ({"decoder": Decoder(torch.ones(2, 4, 8))}, r"expected targets \[2, 9, 8\]"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    problem = Problem()
    values = {"queries": problem.q, "keys": problem.k, "targets": problem.values, **changes}
    with pytest.raises(OperatorInputError, match=message):
        mttt(**values)


def test_presets_differ_where_paper_and_code_do() -> None:
    assert set(PRESETS) == {"paper", "code"}
    paper, code = preset("paper"), preset("code")
    assert (paper.normalizer, code.normalizer) == ("n", "n*d")
    assert (paper.bias, code.bias) == (False, True)
    mlp = preset("paper", learner="mlp", steps=4)
    assert (mlp.initial, mlp.decoder_norm, mlp.learner_bias, mlp.steps) == (
        "learned",
        True,
        True,
        4,
    )
    assert (paper.initial, paper.decoder_norm, paper.learner_bias) == ("zero", False, False)
    assert preset("code", normalizer="1").normalizer == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "papper"}, "expected a preset of paper, code, found 'papper'"),
        ({"stepz": 3}, "stepz"),
        ({"learner": "mlp", "initial": "zero"}, "expected fixed or learned for an MLP"),
        ({"targets": "values", "decoder_norm": True}, "values have no decoder"),
        ({"steps": 3, "eta": (1.0, 1.0)}, "eta: expected one, or 3, found 2"),
        ({"steps": -1}, "steps"),
    ],
)
def test_mistaken_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        preset(**options)
