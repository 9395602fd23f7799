"""The chunked core of TTT-MLP against the plain dual form, forward and by its own backward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import MlpModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.problems import Problem, make_problem
from ttt_adapt.kernels.ttt_mlp import chunked, chunked_group
from ttt_adapt.kernels.ttt_mlp.chunked_group import (
    gelu,
    gelu_constant,
    gelu_curvature,
    gelu_slope,
)

Core = Callable[[Tokens, Shared, Tensors, torch.Tensor | None, bool], tuple[torch.Tensor, Tensors]]
WEIGHTS = ("w1", "b1", "w2", "b2")


def plain(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    return run_mini_batches(MlpModel(), tokens, shared, weights, lengths, causal)


def problem_of(batch: int = 2, length: int = 21, **options: Any) -> Problem:
    """A problem whose rows begin with weights of their own, ``[B, H, ...]``."""
    problem = make_problem("ttt_mlp", batch=batch, length=length, **options)
    generator = torch.Generator().manual_seed(5)
    for name in WEIGHTS:
        tensor = problem.shared[name]
        noise = torch.randn(batch, *tensor.shape, generator=generator, dtype=torch.float64)
        problem.shared[name] = tensor + 0.1 * noise.to(tensor.dtype)
    return problem


def call(
    core: Core, problem: Problem, lengths: torch.Tensor | None = None, causal: bool = True
) -> tuple[torch.Tensor, Tensors]:
    tokens, shared = problem.tokens, problem.shared
    return core(
        Tokens(*(tokens[name] for name in ("q", "k", "v", "lr"))),
        Shared(*(shared[name] for name in ("token_scale", "ln_weight", "ln_bias"))),
        tuple(shared[name] for name in WEIGHTS),
        lengths,
        causal,
    )


def everything(
    core: Core, problem: Problem, lengths: torch.Tensor | None = None, causal: bool = True
) -> dict[str, torch.Tensor]:
    """Output, last weights, and the gradients of a fixed mixture of them by every input."""
    leaf = problem.learnable()
    out, ended = call(core, leaf, lengths, causal)
    if lengths is not None:  # what lies beyond a row's length is meaningless
        real = torch.arange(out.shape[1]) < lengths[:, None]
        out = out.masked_fill(~real[..., None, None], 0.0)
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in (out, *ended):
        mixture = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        total = total + (tensor.double() * mixture).sum()
    leaves = leaf.leaves()
    found = torch.autograd.grad(total, list(leaves.values()))
    results = {"out": out, **dict(zip(WEIGHTS, ended, strict=True))}
    results |= {f"d_{name}": grad for name, grad in zip(leaves, found, strict=True)}
    return {name: tensor.detach() for name, tensor in results.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


@pytest.fixture(params=["whole", "cut"])
def cutting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All inner models at once in few groups; or blocks of few heads, groups of two mini-batches."""
    if request.param == "cut":
        monkeypatch.setattr(chunked_group, "CACHED_BYTES", 2_000 // torch.get_num_threads())
        monkeypatch.setattr(chunked_group, "GROUP", 2)
    return str(request.param)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 21, 32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ragged", [False, True])
def test_equals_the_plain_form(length: int, causal: bool, ragged: bool, cutting: str) -> None:
    problem = problem_of(batch=3, heads=3, length=length)
    lengths = torch.tensor([length, 0, min(6, length)]) if ragged else None
    expected = everything(plain, problem, lengths, causal)
    assert_equal(everything(chunked.core, problem, lengths, causal), expected)


@pytest.mark.parametrize(
    ("batch", "heads", "width", "hidden", "size"),
    [(1, 1, 5, 7, 3), (1, 1, 8, 4, 1), (2, 3, 1, 1, 4), (1, 2, 6, 9, 16), (5, 1, 3, 20, 2)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_any_sizes(
    batch: int, heads: int, width: int, hidden: int, size: int, causal: bool, cutting: str
) -> None:
    problem = problem_of(batch=batch, heads=heads, width=width, hidden=hidden, size=size, length=11)
    expected = everything(plain, problem, causal=causal)
    assert_equal(everything(chunked.core, problem, causal=causal), expected)


def test_blocks_cover_rows_and_heads_once() -> None:
    problem = problem_of(batch=3, heads=5)
    weights = [problem.shared[name] for name in WEIGHTS]
    inputs = chunked_group.Inputs(*[problem.tokens["q"]] * 8, *weights)
    for pairs in (1, 2, 4, 5, 11, 15, 100):
        seen = torch.zeros(3, 5, dtype=torch.int64)
        each = (weights[0][0, 0].numel() + weights[2][0, 0].numel()) * 8
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                chunked_group, "CACHED_BYTES", -(-pairs * each) // torch.get_num_threads()
            )
            for block in chunked_group.blocks_of(inputs):
                part = block.of_weights(seen)
                assert part.numel() <= max(1, pairs)
                part += 1
        assert bool((seen == 1).all())


def test_strided_and_expanded_inputs() -> None:
    problem = problem_of(length=10)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)
        return wide.transpose(0, 1).contiguous().transpose(0, 1)[..., 0]

    odd = problem.map(strided)
    assert not odd.tokens["q"].is_contiguous()
    for found, expected in zip(
        torch.utils._pytree.tree_leaves(call(chunked.core, odd)),
        torch.utils._pytree.tree_leaves(call(chunked.core, problem)),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("lengths", [None, torch.tensor([10, 21])])
def test_inputs_stay_as_they_are(lengths: torch.Tensor | None) -> None:
    problem = problem_of().learnable()
    before = {name: tensor.detach().clone() for name, tensor in problem.leaves().items()}
    out, ended = call(chunked.core, problem, lengths)
    grad = torch.ones_like(out)
    torch.autograd.grad((out, *ended), list(problem.leaves().values()), (grad, *ended))
    assert bool((grad == 1).all())
    for name, tensor in problem.leaves().items():
        assert torch.equal(tensor, before[name])


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [3, 21, 24])
def test_nothing_uninitialised_is_read(
    length: int, causal: bool, cutting: str, poisoned: None
) -> None:
    problem = problem_of(length=length)
    lengths = torch.tensor([2, length])
    for name, tensor in everything(chunked.core, problem, lengths, causal).items():
        assert bool(tensor.isfinite().all()), name
    with torch.no_grad():
        out, ended = call(chunked.core, problem, lengths, causal)
    assert all(bool(tensor.isfinite().all()) for tensor in (out, *ended))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_tolerance_rule(dtype: torch.dtype, causal: bool) -> None:
    """Errors against float64 are at most twice the plain form's at the same dtype.

    Over several problems, for some gradients are few numbers.
    """
    squares: dict[str, list[float]] = {}
    for seed in range(16 if dtype == torch.float32 else 2):
        problem = problem_of(length=45, width=32, hidden=96, size=16, seed=seed).float().to(dtype)
        lengths = torch.tensor([45, 39])
        exact = everything(plain, problem.map(torch.Tensor.double), lengths, causal)
        usual = everything(plain, problem, lengths, causal)
        found = everything(chunked.core, problem, lengths, causal)
        assert found["d_q"].dtype == dtype and found["w1"].dtype == torch.float32
        for name, tensor in exact.items():
            assert found[name].dtype == usual[name].dtype
            total = squares.setdefault(name, [0.0, 0.0])
            total[0] += float((found[name].double() - tensor).square().sum())
            total[1] += float((usual[name].double() - tensor).square().sum())
    for name, (ours, theirs) in squares.items():
        assert ours <= 4 * theirs, (name, (ours / theirs) ** 0.5)


def test_without_gradients_the_same() -> None:
    problem = problem_of()
    with torch.no_grad():
        expected, expected_weights = call(chunked.core, problem.learnable())
    assert not expected.requires_grad
    out, ended = call(chunked.core, problem.learnable())
    assert out.requires_grad and torch.equal(out, expected)
    assert all(map(torch.equal, ended, expected_weights))


def test_gradient_of_one_input_alone() -> None:
    problem = problem_of()
    complete = everything(chunked.core, problem)
    problem.shared["b2"] = problem.shared["b2"].requires_grad_()
    out, _ = call(chunked.core, problem)
    (alone,) = torch.autograd.grad(out.sum(), problem.shared["b2"])
    assert alone.shape == complete["d_b2"].shape and bool(alone.any())


def test_backward_twice_through_a_retained_graph() -> None:
    problem = problem_of().learnable()
    out, _ = call(chunked.core, problem)
    leaves = list(problem.leaves().values())
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), leaves)))


def test_autocast_changes_nothing() -> None:
    problem = problem_of().float()
    expected = everything(chunked.core, problem)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(chunked.core, problem)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_second_derivatives_are_refused() -> None:
    problem = problem_of(length=6).learnable()
    out, _ = call(chunked.core, problem)
    (grad,) = torch.autograd.grad(out.square().sum(), problem.tokens["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(grad.sum())


def saved_bytes(core: Core, problem: Problem) -> int:
    """What autograd keeps beside the inputs, each storage once."""
    leaf = problem.learnable()
    given = {tensor.untyped_storage().data_ptr() for tensor in leaf.leaves().values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call(core, leaf)
    del result
    return sum(kept.values())


def test_saves_few_of_the_weights() -> None:
    few, many = (
        problem_of(length=4 * count, width=16, hidden=64, dtype=torch.float32)
        for count in (64, 256)
    )
    weights = 4 * sum(few.shared[name].numel() for name in WEIGHTS)
    tokens = 4 * few.tokens["q"].numel()
    # The square root of 64 and then a sixteenth of 256 mini-batches' weights, two tensors of q's
    # size, and lr, masks and scales.
    assert saved_bytes(chunked.core, few) < 8 * weights + 2.2 * tokens
    assert saved_bytes(chunked.core, many) < 16 * weights + 4 * 2.2 * tokens
    assert saved_bytes(plain, few) > 64 * weights


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that operations write."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        results = [x for x in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(x)]
        if not func.is_view:
            self.total += sum(x.numel() for x in results)
        return found


def test_backward_is_linear_in_time() -> None:
    totals = []
    for count in (64, 256):
        problem = problem_of(batch=1, heads=1, length=count, size=1, width=2, hidden=2).learnable()
        out, _ = call(chunked.core, problem)
        with Work() as work:  # type: ignore[no-untyped-call]
            torch.autograd.grad(out.sum(), problem.tokens["q"])
        totals.append(work.total)
    assert totals[0] > 0
    assert totals[1] < 4.1 * totals[0]


def test_gelu_and_its_derivatives() -> None:
    x = torch.linspace(-12, 12, 401, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    (slope,) = torch.autograd.grad(expected.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    x = x.detach()
    gate, value, rise, first, second = (torch.empty_like(x) for _ in range(5))
    gelu(x, gelu_constant(x), rise, gate, value)
    gelu_slope(x, gelu_constant(x), rise, gate, value, first)
    gelu_curvature(rise, gate, first, second)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(first, slope.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, curvature, rtol=1e-12, atol=1e-12)
