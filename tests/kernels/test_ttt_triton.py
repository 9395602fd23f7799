"""Triton kernels of TTT-Linear and TTT-MLP against float64, as near as the plain form in the same dtype.

On a machine without a GPU they run in Triton's interpreter, on small shapes.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import LinearModel, MlpModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.operator import run_operator
from ttt_adapt.kernels.inner_loop.problems import OPERATORS, Problem, make_problem
from ttt_adapt.kernels.inner_loop.triton_support import fitting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INNER = {"ttt_linear": LinearModel(), "ttt_mlp": MlpModel()}
WEIGHTS = {"ttt_linear": ("weight", "bias"), "ttt_mlp": ("w1", "b1", "w2", "b2")}
Found = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, FastWeightState | None]
Start = FastWeightState | Tensors | None
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def problem_of(operator: str, seed: int = 0, **sizes: int) -> Problem:
    """In float32 on the device under test; a hidden width of one block if none is given."""
    sizes = {"batch": 1, "heads": 1, "width": 32, "hidden": 32, **sizes}
    problem = make_problem(operator, seed=seed, dtype=torch.float32, **sizes)
    return problem.map(lambda tensor: tensor.to(DEVICE))


def run_plain(problem: Problem, initial_state: Start = None) -> Result:
    """The plain dual form as the operator's core."""
    named = problem.shared
    batch = problem.tokens["q"].shape[0]
    dtype = torch.float64 if problem.tokens["q"].dtype == torch.float64 else torch.float32
    inner, names = INNER[problem.operator], WEIGHTS[problem.operator]
    return run_operator(
        inner,
        partial(run_mini_batches, inner),
        Tokens(**problem.tokens),
        Shared(named["token_scale"], named["ln_weight"], named["ln_bias"]),
        initial_state
        or tuple(named[name].to(dtype).expand(batch, *named[name].shape) for name in names),
        rows=None,
        causal=True,
        output_final_state=True,
    )


def run_triton(problem: Problem, initial_state: Start = None) -> Result:
    return problem.run(backend="triton", output_final_state=True, initial_state=initial_state)


def token_by_token(problem: Problem, state: FastWeightState | None = None) -> Result:
    """Decoding, which leaves the states it is given as they were."""
    outs = []
    for token in range(problem.tokens["q"].shape[1]):
        before = {} if state is None else state.clone().tensors()
        out, after = run_triton(problem.part(token, token + 1), state)
        for name, tensor in before.items():
            assert state is not None and torch.equal(state.tensors()[name], tensor), name
        outs.append(out)
        state = after
    return torch.cat(outs, 1), after


def results_of(run: Callable[..., Any], problem: Problem) -> Found:
    out, final = run(problem)
    assert final is not None
    return {"out": out, **final.tensors()}


def everything_of(run: Callable[..., Any], problem: Problem) -> Found:
    """Results, and gradients of a mixture of them with respect to every input."""
    leaf = problem.learnable()
    out, final = run(leaf)
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for tensor in (out, *final.weights, *final.slots):
        share = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        total = total + (tensor.double() * share.to(DEVICE)).sum()
    leaves = leaf.leaves()
    found = torch.autograd.grad(total, list(leaves.values()))
    gradients = {f"d {name}": grad for name, grad in zip(leaves, found, strict=True)}
    return {"out": out.detach(), **final.detach().tensors(), **gradients}


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
                errors[which] += float((difference.square() / scale).sum())
    for name, (mine, theirs) in squares.items():
        assert mine**0.5 <= 2 * theirs**0.5, f"{name}: {mine**0.5:.2e}, plain {theirs**0.5:.2e}"


def three(problem: Problem, run: Callable[..., Any] | None = None) -> tuple[Found, Found, Found]:
    return (
        everything_of(run or run_triton, problem),
        everything_of(run_plain, problem),
        everything_of(run_plain, double(problem)),
    )


SHAPES = [
    {"size": 4, "length": 18, "hidden": 16},  # groups of two mini-batches, a tail
    {"size": 16, "length": 16, "heads": 2},  # no tail
    {"size": 5, "length": 8, "hidden": 96},  # padded mini-batches, three tiles
    {"size": 16, "length": 3, "hidden": 48},  # a tail alone
    {"size": 1, "length": 3, "hidden": 16},
    {"size": 33, "length": 40, "hidden": 64},
    {"size": 16, "length": 18, "width": 64, "hidden": 64},
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_results_and_every_gradient(operator: str, sizes: dict[str, int]) -> None:
    assert_as_near(three(problem_of(operator, seed, **sizes)) for seed in range(2))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_precision(operator: str, dtype: torch.dtype) -> None:
    assert_as_near(
        three(problem_of(operator, seed, size=16, length=21).to(dtype)) for seed in range(2)
    )


def test_the_exact_form_is_the_reference(operator: str) -> None:
    problem = double(problem_of(operator, size=8, length=11))
    plain = everything_of(run_plain, problem)
    exact = everything_of(
        lambda leaf: leaf.run(backend="reference", output_final_state=True), problem
    )
    for name, tensor in exact.items():
        torch.testing.assert_close(plain[name], tensor, rtol=1e-8, atol=1e-10, msg=name)


def test_ragged_rows_are_as_if_alone(operator: str) -> None:
    problem = problem_of(operator, batch=3, length=21, size=8)
    mask = torch.ones(3, 21, device=DEVICE)
    mask[0, :16] = 0
    mask[1, ::2] = 0

    def run(leaf: Problem) -> Result:
        return leaf.run(backend="triton", attention_mask=mask, output_final_state=True)

    found = results_of(run, problem)
    assert bool((found["out"][mask == 0] == 0).all())
    for row in range(3):
        kept = mask[row].bool()
        tokens = {name: t[row : row + 1][:, kept] for name, t in problem.tokens.items()}
        alone = results_of(run_triton, Problem(operator, tokens, problem.shared, 8))
        torch.testing.assert_close(found["out"][row][kept], alone["out"][0])
        for name in alone.keys() - {"out"}:
            torch.testing.assert_close(found[name][row : row + 1], alone[name])


def test_ragged_gradients(operator: str) -> None:
    lengths = (13, 3)  # the second ends in the first group of three
    mask = torch.arange(13, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]

    def masked(leaf: Problem) -> Result:
        return leaf.run(backend="triton", attention_mask=mask, output_final_state=True)

    def plainly(leaf: Problem) -> Result:
        # The plain form has no masks: each row alone.
        outs, states = [], []
        for index, length in enumerate(lengths):
            tokens = {name: t[index : index + 1, :length] for name, t in leaf.tokens.items()}
            out, state = run_plain(Problem(operator, tokens, leaf.shared, 4))
            assert state is not None
            outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 13 - length)))
            states.append(state.tensors())
        merged = {name: torch.cat([state[name] for state in states]) for name in states[0]}
        return torch.cat(outs), FastWeightState.from_tensors(merged)

    problem = problem_of(operator, batch=2, length=13, size=4, hidden=16)
    found = everything_of(masked, problem)
    for name in problem.tokens:
        assert bool((found[f"d {name}"][~mask] == 0).all())
    plain, exact = everything_of(plainly, problem), everything_of(plainly, double(problem))
    assert_as_near([(found, plain, exact)])


def test_packed_sequences_are_as_if_alone(operator: str) -> None:
    problem = problem_of(operator, length=29, size=16)
    bounds = [0, 16, 17, 29]
    out, state = problem.run(backend="triton", cu_seqlens=bounds, output_final_state=True)
    assert state is not None
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        alone = results_of(run_triton, problem.part(first, last))
        torch.testing.assert_close(out[:, first:last], alone["out"])
        kept = state.select(torch.tensor([row])).tensors()
        for name in alone.keys() - {"out"}:
            torch.testing.assert_close(kept[name], alone[name])


def test_goes_on_at_any_offset_with_gradients(operator: str) -> None:
    problems = [problem_of(operator, seed, length=11, size=4, hidden=16) for seed in range(2)]

    def in_parts(leaf: Problem) -> Result:
        first, state = run_triton(leaf.part(0, 6))
        second, state = run_triton(leaf.part(6, 11), state)
        return torch.cat([first, second], 1), state

    assert_as_near(three(problem, in_parts) for problem in problems)


def test_initial_weights_of_each_row_get_gradients(operator: str) -> None:
    problem = problem_of(operator, batch=2, length=10, size=4)
    weights = tuple(
        torch.randn(2, *problem.shared[name].shape, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate(WEIGHTS[operator])
    )

    def gradients(run: Callable[..., Any], dtype: torch.dtype) -> Found:
        start = tuple((0.3 * w).to(DEVICE, dtype).requires_grad_() for w in weights)
        out, final = run(problem.map(lambda tensor: tensor.to(dtype)), start)
        total = out.square().sum() + sum(w.square().sum() for w in final.weights)
        return dict(zip(WEIGHTS[operator], torch.autograd.grad(total, start), strict=True))

    found, plain = (gradients(run, torch.float32) for run in (run_triton, run_plain))
    assert_as_near([(found, plain, gradients(run_plain, torch.float64))])


def test_decoding_equals_the_whole(operator: str) -> None:
    problem = problem_of(operator, batch=2, length=10, size=5, hidden=48)
    mask = torch.ones(2, 3, device=DEVICE)
    mask[0, :2] = 0  # rows at different offsets
    out, state = problem.part(0, 3).run(
        backend="triton", attention_mask=mask, output_final_state=True
    )
    later, state = token_by_token(problem.part(3, 10), state)
    whole_mask = torch.cat([mask, torch.ones(2, 7, device=DEVICE)], 1)
    whole, final = problem.run(backend="triton", attention_mask=whole_mask, output_final_state=True)
    assert state is not None and final is not None
    torch.testing.assert_close(torch.cat([out, later], 1), whole)
    for name, tensor in final.tensors().items():
        torch.testing.assert_close(state.tensors()[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [15, 16])
def test_a_decoded_token_is_as_near_as_the_plain_one(
    operator: str, dtype: torch.dtype, length: int
) -> None:
    problem = problem_of(operator, batch=2, length=17, size=8, hidden=64).to(dtype)
    _, state = run_plain(problem.part(0, length))
    assert state is not None
    token = problem.part(length, length + 1)
    exact = state.map(lambda t: t if t.dtype == torch.int64 else t.double())

    def results(run: Callable[..., Any], problem: Problem, state: FastWeightState) -> Found:
        return results_of(lambda leaf: run(leaf, state), problem)

    found, plain = (results(run, token, state) for run in (run_triton, run_plain))
    assert_as_near([(found, plain, results(run_plain, double(token), exact))])


def test_decoding_with_gradients_takes_the_differentiable_way(operator: str) -> None:
    problem = problem_of(operator, length=6, size=4, hidden=16)
    expected = everything_of(run_plain, problem)

    for name, tensor in everything_of(token_by_token, problem).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote to is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert bool(torch.empty(4, device=DEVICE).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)


def test_nothing_unwritten_is_read_and_inputs_stay(operator: str, poisoned: None) -> None:
    problem = problem_of(operator, batch=2, length=7, size=4, hidden=48)
    mask = torch.ones(2, 7, device=DEVICE)
    mask[0, :3] = 0
    kept = problem.map(torch.Tensor.clone)

    def run(leaf: Problem) -> Result:
        first, state = leaf.part(0, 6).run(
            backend="triton", attention_mask=mask[:, :6], output_final_state=True
        )
        last, state = run_triton(leaf.part(6, 7), state)
        return torch.cat([first, last], 1), state

    found, alone = everything_of(run, problem), results_of(run, problem)
    for name, tensor in found.items():
        assert bool(tensor.isfinite().all()), name
    for name, tensor in alone.items():  # decoded in the end, and nothing saved on the way
        torch.testing.assert_close(tensor, found[name])
    for name, tensor in problem.leaves().items():
        torch.testing.assert_close(tensor, kept.leaves()[name], rtol=0, atol=0)


def test_layouts_do_not_matter(operator: str) -> None:
    dense = problem_of(operator, batch=2, length=2, size=2, heads=2, hidden=16)
    dense.tokens["lr"] = dense.tokens["lr"][:, :, :1].expand(-1, -1, 2).contiguous()
    other = dense.map(torch.Tensor.clone)
    for name, axes in (("q", (1, 2)), ("k", (2, 3)), ("v", (0, 1))):
        tensor = other.tokens[name]
        other.tokens[name] = tensor.transpose(*axes).contiguous().transpose(*axes)
        assert not other.tokens[name].is_contiguous()
    other.tokens["lr"] = dense.tokens["lr"][:, :, :1].expand(-1, -1, 2)
    for name in WEIGHTS[operator][::2]:
        other.shared[name] = other.shared[name].transpose(1, 2).contiguous().transpose(1, 2)

    def found(problem: Problem) -> Found:
        leaf = problem.map(lambda tensor: tensor.detach().requires_grad_())
        out, _ = leaf.run(backend="triton")
        # An expanded gradient comes in.
        gradients = torch.autograd.grad(out.sum(), list(leaf.leaves().values()))
        return {"out": out, **dict(zip(leaf.leaves(), gradients, strict=True))}

    expected = found(dense)
    for name, tensor in found(other).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_what_the_kernels_lack_is_said(operator: str) -> None:
    wide = problem_of(operator, length=3, size=65)
    with pytest.raises(OperatorInputError, match="mini-batches of at most 64, found 65"):
        wide.run(backend="triton")
    odd = problem_of("ttt_mlp", length=3, size=4, hidden=24)
    with pytest.raises(OperatorInputError, match="width that is a multiple of 16, found 24"):
        odd.run(backend="triton")
    shared_memory = "30 bytes of shared memory .* has 20; use bfloat16"
    with (
        pytest.raises(OperatorInputError, match=shared_memory),
        fitting(operator, wide.tokens["q"], 65),
    ):
        raise OutOfResources(30, 20, "shared memory")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("size", "length"), [(16, 517), (20, 517), (64, 517), (16, 2048)])
def test_real_shapes(operator: str, dtype: torch.dtype, width: int, size: int, length: int) -> None:
    sizes = {"batch": 2, "heads": 4, "length": length, "width": width, "size": size}
    assert_as_near([three(problem_of(operator, **sizes, hidden=4 * width).to(dtype))])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_the_same_inputs_give_the_same_bits(operator: str, width: int) -> None:
    # Weights are changed in place by many threads: a missing barrier shows here first.
    problem = problem_of(
        operator, batch=8, length=517, width=width, size=16, heads=16, hidden=4 * width
    )
    first, second = (everything_of(run_triton, problem.to(torch.bfloat16)) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 64, 128])
def test_decoding_many_tokens(operator: str, width: int) -> None:
    sizes = {"batch": 4, "length": 100, "width": width, "size": 16, "heads": 8}
    problem = problem_of(operator, **sizes, hidden=4 * width)

    def in_parts(problem: Problem) -> Result:
        out, state = run_triton(problem.part(0, 50))
        later, state = token_by_token(problem.part(50, 100), state)
        return torch.cat([out, later], 1), state

    whole, found = results_of(run_triton, problem), results_of(in_parts, problem)
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4)
