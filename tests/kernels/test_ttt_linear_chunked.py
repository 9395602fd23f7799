"""The fast form of TTT-Linear: values, every gradient, rounding error, memory and work."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.checkpointing import Grouping, mini_batch_scales
from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import LinearModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.operator import Core
from ttt_adapt.kernels.inner_loop.problems import Problem, make_problem
from ttt_adapt.kernels.ttt_linear import chunked, reference

NAMES = ("q", "k", "v", "lr", "token_scale", "ln_weight", "ln_bias", "weight", "bias")
Found = dict[str, torch.Tensor]


def plain_core(
    tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    return run_mini_batches(LinearModel(), tokens, shared, weights, lengths, causal)


def inputs_of(problem: Problem) -> dict[str, torch.Tensor]:
    """The core's inputs by name, weights with rows of their own."""
    leaves = problem.leaves()
    batch = leaves["q"].shape[0]
    generator = torch.Generator().manual_seed(5)
    for name in ("weight", "bias"):
        value = leaves[name]
        noise = torch.randn(batch, *value.shape, generator=generator, dtype=torch.float64)
        leaves[name] = (value + 0.1 * noise).to(value.dtype)
    return {name: leaves[name] for name in NAMES}


def call(
    core: Core, inputs: dict[str, torch.Tensor], lengths: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, Tensors]:
    q, k, v, lr, token_scale, ln_weight, ln_bias, *weights = inputs.values()
    tokens, shared = Tokens(q, k, v, lr), Shared(token_scale, ln_weight, ln_bias)
    return core(tokens, shared, tuple(weights), lengths, causal)


def everything(
    core: Core,
    inputs: dict[str, torch.Tensor],
    lengths: torch.Tensor | None = None,
    *,
    causal: bool = True,
    of: str = "all",
) -> Found:
    """Outputs within the rows' lengths, final weights, and the gradients of a mixture of them."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    out, weights = call(core, leaves, lengths, causal)
    assert bool(out.isfinite().all())
    if lengths is not None:
        beyond = torch.arange(out.shape[1]) >= lengths[:, None]
        out = out.masked_fill(beyond[..., None, None], 0.0)
    found = {"out": out, "final weight": weights[0], "final bias": weights[1]}
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for name, value in found.items():
        mixture = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if of in ("all", name):
            total = total + (value * mixture).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach() for name, value in found.items()}


def assert_all_close(found: Found, expected: Found, rtol: float = 1e-9) -> None:
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        off = float((found[name] - value).abs().max())
        assert off <= rtol * scale, f"{name}: off by {off:.1e} where the largest is {scale:.1e}"


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """``torch.empty`` and its kin give NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert bool(torch.empty(8).isnan().all()) and bool(torch.ones(1).new_empty(8).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 11, 16, 37])
def test_all_gradients_at_every_length(length: int, causal: bool, poisoned_empty: None) -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=length))
    expected = everything(plain_core, inputs, causal=causal)
    assert_all_close(everything(chunked.core, inputs, causal=causal), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_all_gradients_of_ragged_rows(causal: bool, poisoned_empty: None) -> None:
    """Also of a row that ends within its first mini-batch, at an edge, and one without tokens."""
    lengths = torch.tensor([21, 3, 8, 0, 14])
    inputs = inputs_of(make_problem("ttt_linear", batch=5, length=21))
    expected = everything(plain_core, inputs, lengths, causal=causal)
    assert_all_close(everything(chunked.core, inputs, lengths, causal=causal), expected)
    slow = everything(reference.core, inputs, lengths, causal=causal)
    assert_all_close(expected, slow)


@pytest.mark.parametrize("of", ["out", "final weight", "final bias"])
def test_gradients_of_one_result_alone(of: str) -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=14))
    expected = everything(plain_core, inputs, of=of)
    assert_all_close(everything(chunked.core, inputs, of=of), expected)


def test_numerical_gradients() -> None:
    """Against finite differences, so that no shared derivation hides a mistake."""
    inputs = inputs_of(make_problem("ttt_linear", batch=1, length=5, heads=1, width=3, size=2))
    leaves = [value.detach().requires_grad_() for value in inputs.values()]

    def results(*values: torch.Tensor) -> Tensors:
        out, weights = call(chunked.core, dict(zip(NAMES, values, strict=True)), None, True)
        return (out, *weights)

    assert torch.autograd.gradcheck(results, leaves, fast_mode=True)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_any_group_size_gives_the_same(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=30))
    expected = everything(plain_core, inputs)

    class Fixed(Grouping):
        @classmethod
        def of(cls, q: torch.Tensor, size: int, group_: int | None = None) -> Grouping:
            return Grouping.of(q, size, group)

    monkeypatch.setattr(chunked, "Grouping", Fixed)
    assert_all_close(everything(chunked.core, inputs), expected)


def test_learning_rates_and_scales_of_zero() -> None:
    """Nothing is divided by them: their gradients are exact there too."""
    inputs = inputs_of(make_problem("ttt_linear", length=10))
    inputs["lr"][:, ::3] = 0.0
    inputs["token_scale"][1:] = 0.0
    assert_all_close(everything(chunked.core, inputs), everything(plain_core, inputs))


def test_constant_outputs_of_the_inner_model() -> None:
    """Weights of zero: layer norm of zeros, where its epsilon is all there is."""
    inputs = inputs_of(make_problem("ttt_linear", length=10))
    for name in ("weight", "bias"):
        inputs[name] = torch.zeros_like(inputs[name])
    expected = everything(plain_core, inputs)
    assert_all_close(everything(chunked.core, inputs), expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ],
)
def test_error_is_at_most_twice_the_plain_form_s(dtype: torch.dtype, causal: bool) -> None:
    """The greatest error over a few problems; for the scale of the last token, which is one number
    and may be lucky by a factor, the root mean square."""
    lengths = torch.tensor([40, 25])
    plain_errors: dict[str, list[torch.Tensor]] = {}
    errors: dict[str, list[torch.Tensor]] = {}
    for seed in range(4):
        problem = make_problem(
            "ttt_linear", length=40, heads=1, width=64, size=16, seed=seed, dtype=torch.float32
        )
        inputs = inputs_of(problem)
        inputs["weight"] = 0.1 * inputs["weight"]
        inputs |= {name: inputs[name].to(dtype) for name in ("q", "k", "v")}
        exact = {name: value.double() for name, value in inputs.items()}
        truth = everything(plain_core, exact, lengths, causal=causal)
        plain = everything(plain_core, inputs, lengths, causal=causal)
        fast = everything(chunked.core, inputs, lengths, causal=causal)
        for name, value in truth.items():
            assert fast[name].dtype == plain[name].dtype, name
            for found, into in ((plain, plain_errors), (fast, errors)):
                into.setdefault(name, []).append((found[name] - value) / value.abs().max())
    for name, found_errors in errors.items():
        size = rms if name == "d token_scale" else greatest
        assert size(torch.stack(found_errors)) <= 2 * size(torch.stack(plain_errors[name])), name


def inputs_of_a_layer(problem: Problem) -> dict[str, torch.Tensor]:
    """Keys, values and weights of the size that projections give them at the start of training."""
    inputs = inputs_of(problem)
    for name, size in {"q": 0.5, "k": 0.5, "v": 0.5, "weight": 0.1}.items():
        inputs[name] = size * inputs[name]
    return inputs


def test_error_does_not_grow_with_the_number_of_tokens() -> None:
    """A rounding error that learning amplifies shows only after many mini-batches."""
    problem = make_problem(
        "ttt_linear", batch=1, length=2048, heads=1, width=64, size=16, dtype=torch.float32
    )
    inputs = inputs_of_a_layer(problem)
    with torch.no_grad():
        exact = {name: value.double() for name, value in inputs.items()}
        truth = call(plain_core, exact, None, True)
        plain = call(plain_core, inputs, None, True)
        fast = call(chunked.core, inputs, None, True)
    for part in (slice(None, 512), slice(-512, None)):
        error = greatest((fast[0] - truth[0])[:, part])
        assert error <= 2 * greatest((plain[0] - truth[0])[:, part])
    for one, other, true in zip(fast[1], plain[1], truth[1], strict=True):
        assert greatest(one - true) <= 2 * greatest(other - true)


def test_error_of_gradients_does_not_grow_with_the_number_of_tokens() -> None:
    problem = make_problem(
        "ttt_linear", batch=1, length=512, heads=1, width=32, size=16, dtype=torch.float32
    )
    inputs = inputs_of_a_layer(problem)
    exact = {name: value.double() for name, value in inputs.items()}
    truth = everything(plain_core, exact)
    plain, fast = everything(plain_core, inputs), everything(chunked.core, inputs)
    for name in ("d q", "d k", "d v", "d lr", "d weight", "d bias"):
        assert greatest(fast[name] - truth[name]) <= 2 * greatest(plain[name] - truth[name]), name


def greatest(errors: torch.Tensor) -> float:
    return float(errors.abs().max())


def rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())


def test_weights_are_untouched_where_nothing_was_folded() -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=9).float())
    _, weights = call(chunked.core, inputs, torch.tensor([9, 3]), True)
    for found, name in zip(weights, ("weight", "bias"), strict=True):
        assert torch.equal(found[1], inputs[name][1]) and not torch.equal(found[0], inputs[name][0])


def test_inputs_stay_as_they_are(poisoned_empty: None) -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=13))
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    out, weights = call(chunked.core, leaves, torch.tensor([13, 6]), True)
    (out.sum() + weights[0].square().sum()).backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert torch.equal(leaf.detach(), inputs[name]), name


def test_strided_and_broadcast_inputs() -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=13))
    expected = everything(plain_core, inputs)
    inputs |= {name: inputs[name].transpose(1, 3) for name in ("q", "k", "v")}
    inputs = {name: value.contiguous() for name, value in inputs.items()}

    def core(
        tokens: Tokens, shared: Shared, weights: Tensors, lengths: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, Tensors]:
        q, k, v = (tensor.transpose(1, 3) for tensor in tokens[:3])
        return chunked.core(Tokens(q, k, v, tokens.lr), shared, weights, lengths, causal)

    found = everything(core, inputs)
    for name in ("d q", "d k", "d v"):
        found[name] = found[name].transpose(1, 3)
    assert_all_close(found, expected)
    weight = inputs["weight"][:1]
    broadcast = {**inputs, "weight": weight.expand(2, *weight.shape[1:])}
    assert_all_close(
        everything(core, {**inputs, "weight": broadcast["weight"].contiguous()}),
        everything(core, broadcast),
    )


def test_autocast_does_not_reach_the_state() -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=13).float())
    expected = everything(chunked.core, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = everything(chunked.core, inputs)
    assert_all_close(found, expected, rtol=0)


def test_second_derivatives_are_refused() -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=5))
    inputs["q"].requires_grad_()
    out, _ = call(chunked.core, inputs, None, True)
    with pytest.raises(OperatorInputError, match="no second derivatives; use backend='reference'"):
        torch.autograd.grad(out.square().sum(), inputs["q"], create_graph=True)


def saved_bytes(run: Callable[[], Any], but: tuple[torch.Tensor, ...]) -> int:
    """Bytes kept for the backward pass beyond the memory of ``but``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in but}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(size for place, size in kept.items() if place not in known)


@pytest.mark.parametrize("num_mini_batches", [16, 64])
def test_weights_are_kept_for_few_mini_batches(num_mini_batches: int) -> None:
    """√M of M; the plain form keeps more than all of them."""
    problem = make_problem(
        "ttt_linear", batch=1, length=4 * num_mini_batches, width=32, dtype=torch.float32
    )
    inputs = {name: value.requires_grad_() for name, value in inputs_of(problem).items()}
    one = 2 * 33 * 32 * 4
    kept = saved_bytes(lambda: call(chunked.core, inputs, None, True), tuple(inputs.values()))
    root = round(num_mini_batches**0.5)
    # Beside the weights: learning rates, scales, a few numbers a mini-batch.
    assert root * one <= kept <= root * one + 64 * num_mini_batches * 4
    plain = saved_bytes(lambda: call(plain_core, inputs, None, True), tuple(inputs.values()))
    assert plain >= num_mini_batches * one


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and the elements they give."""

    num_calls = num_elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.num_elements += tensor.numel()
        self.num_calls += 1
        return result


def backward_work(num_mini_batches: int) -> tuple[int, int]:
    problem = make_problem("ttt_linear", batch=1, length=4 * num_mini_batches, dtype=torch.float32)
    inputs = {name: value.requires_grad_() for name, value in inputs_of(problem).items()}
    out, _ = call(chunked.core, inputs, None, True)
    with Work() as work:  # type: ignore[no-untyped-call]
        torch.autograd.grad(out.sum(), list(inputs.values()))
    return work.num_calls, work.num_elements


def test_backward_is_linear_in_the_number_of_tokens() -> None:
    calls, elements = backward_work(16)
    more_calls, more_elements = backward_work(64)
    assert more_calls <= 4 * calls and more_elements <= 4.2 * elements


def test_no_gradients_no_checkpoints() -> None:
    inputs = inputs_of(make_problem("ttt_linear", length=13))
    out, weights = call(chunked.core, inputs, None, True)
    assert not out.requires_grad and not weights[0].requires_grad
    inputs["k"].requires_grad_()
    with torch.no_grad():
        assert not call(chunked.core, inputs, None, True)[0].requires_grad


@pytest.mark.parametrize("num_tokens", [1, 4, 11, 12])
def test_groups_cover_the_tokens_once(num_tokens: int) -> None:
    tokens = torch.randn(2, num_tokens, 3, 5)
    grouping = Grouping.of(tokens, 4)
    back = torch.full_like(tokens, torch.nan)
    for first, last in grouping.spans():
        parts = torch.empty(last - first, 6, 4, 5)
        grouping.load(tokens, first, last, parts)
        assert torch.equal(parts[0, 4, 0], tokens[1, 4 * first, 1])
        grouping.store(parts, first, last, back)
    assert torch.equal(back, tokens)


def test_scales_of_ragged_rows() -> None:
    token_scale = torch.tensor([1.0, 0.5, 0.25])
    grouping = Grouping(batch=2, num_tokens=8, heads=1, size=3, group=2)
    lengths = torch.tensor([7, 2])
    visible, fold = mini_batch_scales(token_scale, lengths, grouping, causal=True)
    assert visible.tolist() == [[[[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.25]]]]
    assert fold[:, :, 0, 0].tolist() == [[0.25, 0], [0.25, 0], [0, 0]]
    visible, fold = mini_batch_scales(token_scale, lengths, grouping, causal=False)
    assert fold[:, :, 0, 0].tolist() == [[0.25, 0.5], [0.25, 0], [1.0, 0]]
    assert visible is fold
