"""Triton kernels of TTT-Linear against float64, as near as the plain form in the same dtype.

On a machine without a GPU they run in Triton's interpreter, on small shapes.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import LinearModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.operator import run_operator
from ttt_adapt.kernels.inner_loop.problems import Problem, make_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Found = dict[str, torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def problem_of(seed: int = 0, **sizes: int) -> Problem:
    """In float32 on the device under test."""
    problem = make_problem("ttt_linear", seed=seed, dtype=torch.float32, **sizes)
    return problem.map(lambda tensor: tensor.to(DEVICE))


def run_plain(
    problem: Problem, initial_state: FastWeightState | Tensors | None = None
) -> tuple[torch.Tensor, FastWeightState | None]:
    """The plain dual form as the operator's core."""
    named = problem.shared
    shared = Shared(named["token_scale"], named["ln_weight"], named["ln_bias"])
    batch = problem.tokens["q"].shape[0]
    dtype = torch.float64 if problem.tokens["q"].dtype == torch.float64 else torch.float32
    state: FastWeightState | Tensors = initial_state or tuple(
        named[name].to(dtype).expand(batch, *named[name].shape) for name in ("weight", "bias")
    )
    inner = LinearModel()
    return run_operator(
        inner,
        partial(run_mini_batches, inner),
        Tokens(**problem.tokens),
        shared,
        state,
        rows=None,
        causal=True,
        output_final_state=True,
    )


def run_triton(
    problem: Problem, initial_state: FastWeightState | Tensors | None = None
) -> tuple[torch.Tensor, FastWeightState | None]:
    return problem.run(backend="triton", output_final_state=True, initial_state=initial_state)


def results_of(run: Callable[..., Any], problem: Problem) -> Found:
    out, final = run(problem)
    assert final is not None
    return {"out": out, **final.tensors()}


def gradients_of(run: Callable[..., Any], problem: Problem) -> Found:
    """Of a mixture of outputs and final state, with respect to every input."""
    leaf = problem.learnable()
    out, final = run(leaf)
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for tensor in (out, *final.weights, *final.slots):
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        total = total + (tensor.double() * weights.to(DEVICE)).sum()
    leaves = leaf.leaves()
    found = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def double(problem: Problem) -> Problem:
    return problem.map(torch.Tensor.double)


def assert_as_near(rows: Iterable[tuple[Found, Found, Found]]) -> None:
    """Root-mean-square errors over several problems (found, plain, exact): at most twice plain's.

    A few numbers are near by luck: small tensors are taken together, each relative to its size.
    """
    squares: dict[str, list[float]] = {}
    for found, plain, exact in rows:
        for name, tensor in exact.items():
            assert found[name].dtype == plain[name].dtype, name
            small = tensor.numel() < 256
            scale = tensor.double().square().mean().clamp(min=1e-300) if small else 1.0
            errors = squares.setdefault("small tensors" if small else name, [0.0, 0.0])
            for which, results in enumerate((found, plain)):
                difference = results[name].double() - tensor
                errors[which] += (difference.square() / scale).sum().item()
    for name, (mine, theirs) in squares.items():
        assert mine**0.5 <= 2 * theirs**0.5, f"{name}: {mine**0.5:.2e}, plain {theirs**0.5:.2e}"


def three(compute: Callable[..., Found], problem: Problem) -> tuple[Found, Found, Found]:
    return (
        compute(run_triton, problem),
        compute(run_plain, problem),
        compute(run_plain, double(problem)),
    )


SHAPES = [
    {"width": 32, "size": 16, "length": 69, "batch": 1, "heads": 1},
    {"width": 64, "size": 16, "length": 32, "batch": 1, "heads": 1},
    {"width": 32, "size": 5, "length": 13, "batch": 1, "heads": 2},
    {"width": 32, "size": 16, "length": 3, "batch": 1, "heads": 1},
    {"width": 32, "size": 1, "length": 3, "batch": 1, "heads": 1},
    {"width": 32, "size": 33, "length": 40, "batch": 1, "heads": 1},
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_outputs_and_final_state(sizes: dict[str, int]) -> None:
    assert_as_near(three(results_of, problem_of(seed, **sizes)) for seed in range(2))


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_gradient(sizes: dict[str, int]) -> None:
    assert_as_near(three(gradients_of, problem_of(seed, **sizes)) for seed in range(2))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("compute", [results_of, gradients_of])
def test_half_precision(dtype: torch.dtype, compute: Callable[..., Found]) -> None:
    sizes = {"width": 32, "size": 16, "length": 37, "batch": 1, "heads": 2}
    assert_as_near(three(compute, problem_of(seed, **sizes).to(dtype)) for seed in range(2))


def test_the_exact_form_is_the_reference() -> None:
    problem = double(problem_of(width=32, size=16, length=21, batch=1, heads=1))
    for compute in (results_of, gradients_of):
        plain = compute(run_plain, problem)
        exact = compute(
            lambda leaf: leaf.run(backend="reference", output_final_state=True), problem
        )
        for name, tensor in exact.items():
            torch.testing.assert_close(plain[name], tensor, rtol=1e-8, atol=1e-10, msg=name)


def test_ragged_rows_are_as_if_alone() -> None:
    problem = problem_of(batch=3, length=21, width=32, size=8, heads=1)
    mask = torch.ones(3, 21, device=DEVICE)
    mask[0, :16] = 0  # no tail
    mask[1, ::2] = 0

    def run(leaf: Problem) -> tuple[torch.Tensor, FastWeightState | None]:
        return leaf.run(backend="triton", attention_mask=mask, output_final_state=True)

    found, gradients = results_of(run, problem), gradients_of(run, problem)
    assert bool((found["out"][mask == 0] == 0).all())
    for name in ("q", "k", "v", "lr"):
        assert bool((gradients[name][mask == 0] == 0).all())
    for row in range(3):
        kept = mask[row].bool()
        tokens = {name: t[row : row + 1][:, kept] for name, t in problem.tokens.items()}
        alone = results_of(run_triton, Problem("ttt_linear", tokens, problem.shared, 8))
        torch.testing.assert_close(found["out"][row][kept], alone["out"][0])
        for name in alone.keys() - {"out"}:
            torch.testing.assert_close(found[name][row : row + 1], alone[name])


def test_packed_sequences_are_as_if_alone() -> None:
    problem = problem_of(batch=1, length=29, width=32, size=16, heads=1)
    bounds = [0, 16, 17, 29]
    out, state = problem.run(backend="triton", cu_seqlens=bounds, output_final_state=True)
    assert state is not None
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        alone = results_of(run_triton, problem.part(first, last))
        torch.testing.assert_close(out[:, first:last], alone["out"])
        kept = state.select(torch.tensor([row])).tensors()
        for name in alone.keys() - {"out"}:
            torch.testing.assert_close(kept[name], alone[name])


def test_goes_on_at_any_offset_with_gradients() -> None:
    problems = [
        problem_of(seed, batch=2, length=15, width=32, size=4, heads=1) for seed in range(2)
    ]

    def in_parts(leaf: Problem) -> tuple[torch.Tensor, FastWeightState | None]:
        first, state = run_triton(leaf.part(0, 6))
        second, state = run_triton(leaf.part(6, 15), state)
        return torch.cat([first, second], 1), state

    for compute in (results_of, gradients_of):
        assert_as_near(
            (compute(in_parts, p), compute(run_plain, p), compute(run_plain, double(p)))
            for p in problems
        )


def test_initial_weights_of_each_row_get_gradients() -> None:
    problem = problem_of(batch=2, length=21, width=32, size=8, heads=1)
    weights = tuple(
        torch.randn(2, *problem.shared[name].shape, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate(("weight", "bias"))
    )

    def gradients(run: Callable[..., Any], dtype: torch.dtype) -> Found:
        start = tuple((0.3 * w).to(DEVICE, dtype).requires_grad_() for w in weights)
        out, final = run(problem.map(lambda tensor: tensor.to(dtype)), start)
        total = out.square().sum() + sum(w.square().sum() for w in final.weights)
        return dict(zip(("weight", "bias"), torch.autograd.grad(total, start), strict=True))

    found, plain = (gradients(run, torch.float32) for run in (run_triton, run_plain))
    assert_as_near([(found, plain, gradients(run_plain, torch.float64))])


@pytest.mark.parametrize("size", [4, 5])
def test_decoding_equals_the_whole(size: int) -> None:
    problem = problem_of(batch=2, length=14, width=32, size=size, heads=1)
    mask = torch.ones(2, 3, device=DEVICE)
    mask[0, :2] = 0  # rows at different offsets
    out, state = problem.part(0, 3).run(
        backend="triton", attention_mask=mask, output_final_state=True
    )
    outs = [out]
    for token in range(3, 14):
        assert state is not None
        before = state.clone()
        out, state_after = problem.part(token, token + 1).run(
            backend="triton", initial_state=state, output_final_state=True
        )
        for name, tensor in before.tensors().items():
            torch.testing.assert_close(state.tensors()[name], tensor, rtol=0, atol=0)
        state = state_after
        outs.append(out)
    whole_mask = torch.cat([mask, torch.ones(2, 11, device=DEVICE)], 1)
    whole, final = problem.run(backend="triton", attention_mask=whole_mask, output_final_state=True)
    assert state is not None and final is not None
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    for name, tensor in final.tensors().items():
        torch.testing.assert_close(state.tensors()[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decoded_token_is_as_near_as_the_plain_one(dtype: torch.dtype) -> None:
    problem = problem_of(batch=3, length=19, width=64, size=8, heads=2).to(dtype)
    _, state = run_plain(problem.part(0, 15))
    assert state is not None
    token = problem.part(15, 16)
    exact = state.map(lambda t: t if t.dtype == torch.int64 else t.double())

    def results(run: Callable[..., Any], problem: Problem, state: FastWeightState) -> Found:
        return results_of(lambda leaf: run(leaf, state), problem)

    found, plain = (results(run, token, state) for run in (run_triton, run_plain))
    assert_as_near([(found, plain, results(run_plain, double(token), exact))])


def test_decoding_with_gradients_takes_the_differentiable_way() -> None:
    problem = problem_of(batch=1, length=7, width=32, size=4, heads=1)
    expected = gradients_of(run_plain, problem)

    def token_by_token(leaf: Problem) -> tuple[torch.Tensor, FastWeightState | None]:
        outs, state = [], None
        for token in range(7):
            out, state = run_triton(leaf.part(token, token + 1), state)
            outs.append(out)
        return torch.cat(outs, 1), state

    for name, gradient in gradients_of(token_by_token, problem).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote to is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert bool(torch.empty(4, device=DEVICE).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)


def test_nothing_unwritten_is_read_and_inputs_stay(poisoned: None) -> None:
    problem = problem_of(batch=2, length=21, width=32, size=8, heads=1)
    mask = torch.ones(2, 21, device=DEVICE)
    mask[0, :9] = 0
    kept = problem.map(torch.Tensor.clone)

    def run(leaf: Problem) -> tuple[torch.Tensor, FastWeightState | None]:
        first, state = leaf.part(0, 20).run(
            backend="triton", attention_mask=mask[:, :20], output_final_state=True
        )
        last, state = leaf.part(20, 21).run(
            backend="triton", initial_state=state, output_final_state=True
        )
        return torch.cat([first, last], 1), state

    for compute in (results_of, gradients_of):
        for name, tensor in compute(run, problem).items():
            assert bool(tensor.isfinite().all()), name
    for name, tensor in problem.leaves().items():
        torch.testing.assert_close(tensor, kept.leaves()[name], rtol=0, atol=0)


def test_layouts_do_not_matter() -> None:
    dense = problem_of(batch=2, length=6, width=32, size=4, heads=2)
    dense.tokens["lr"] = dense.tokens["lr"][:, :, :1].expand(-1, -1, 2).contiguous()
    other = dense.map(torch.Tensor.clone)
    for name, axes in (("q", (1, 2)), ("k", (2, 3)), ("v", (0, 1))):
        tensor = other.tokens[name]
        other.tokens[name] = tensor.transpose(*axes).contiguous().transpose(*axes)
        assert not other.tokens[name].is_contiguous()
    other.tokens["lr"] = dense.tokens["lr"][:, :, :1].expand(-1, -1, 2)
    other.shared["weight"] = other.shared["weight"].transpose(1, 2).contiguous().transpose(1, 2)
    expected, found = results_of(run_triton, dense), results_of(run_triton, other)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)

    def gradients(problem: Problem) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in problem.tokens.values()]
        leaf = Problem("ttt_linear", dict(zip(problem.tokens, leaves, strict=True)),
                       problem.shared, 4)  # fmt: skip
        out, _ = leaf.run(backend="triton")
        return torch.autograd.grad(out.sum(), leaves)  # an expanded gradient comes in

    for one, two in zip(gradients(dense), gradients(other), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_what_does_not_fit_is_said() -> None:
    wide = problem_of(batch=1, length=70, width=32, size=65, heads=1)
    with pytest.raises(OperatorInputError, match="at most 64, found 65"):
        wide.run(backend="triton")
    from triton.runtime.errors import OutOfResources

    from ttt_adapt.kernels.inner_loop.triton_support import fitting

    with (
        pytest.raises(
            OperatorInputError, match="30 bytes of shared memory .* has 20; use bfloat16"
        ),
        fitting("ttt_linear", wide.tokens["q"], 65),
    ):
        raise OutOfResources(30, 20, "shared memory")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("size", [16, 20, 64])
@pytest.mark.parametrize("compute", [results_of, gradients_of])
def test_real_shapes(
    dtype: torch.dtype, width: int, size: int, compute: Callable[..., Found]
) -> None:
    problem = problem_of(batch=2, length=1001, width=width, size=size, heads=4).to(dtype)
    assert_as_near([three(compute, problem)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_sequences(dtype: torch.dtype) -> None:
    problem = problem_of(batch=4, length=4096, width=64, size=16, heads=12).to(dtype)
    for compute in (results_of, gradients_of):
        assert_as_near([three(compute, problem)])


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits() -> None:
    problem = problem_of(batch=8, length=517, width=64, size=16, heads=16).to(torch.bfloat16)
    for compute in (results_of, gradients_of):
        first, second = compute(run_triton, problem), compute(run_triton, problem)
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 64, 128])
def test_decoding_many_tokens(width: int) -> None:
    problem = problem_of(batch=4, length=100, width=width, size=16, heads=8)
    whole, final = run_triton(problem)
    out, state = run_triton(problem.part(0, 50))
    outs = [out]
    for token in range(50, 100):
        out, state = run_triton(problem.part(token, token + 1), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-4, atol=1e-4)
    assert state is not None and final is not None
    for name, tensor in final.tensors().items():
        torch.testing.assert_close(state.tensors()[name], tensor, rtol=1e-4, atol=1e-4)
