"""The operator whole: the chunked form against the per-token reference, states, precision, cost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ttt_adapt.kernels.fast_weights import InnerLearner
from ttt_adapt.kernels.fast_weights.problems import (
    Leaves,
    Problem,
    extras_of,
    learners,
    make_problem,
)


def name_of(learner: InnerLearner) -> str:
    flags = [name for name in ("muon", "normalize") if getattr(learner, name)]
    return "-".join([learner.model, learner.loss, learner.step, learner.order, *flags])


EVERY = list(learners())
every_learner = pytest.mark.parametrize("learner", EVERY, ids=name_of)
CAUSAL = [learner for learner in EVERY if learner.causal]


def outcome(problem: Problem, **options: Any) -> tuple[Leaves, Leaves]:
    """Output and final state; gradients of a fixed mixture of them for every input."""
    leaf = problem.map(lambda x: x.detach().clone().requires_grad_())
    out, state = leaf.run(output_final_state=True, **options)
    assert state is not None
    found = {"out": out, **state.tensors()}
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in found.values():
        mixture = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        total = total + (tensor * mixture).sum()
    leaves = leaf.leaves()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return found, {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def assert_same(found: Leaves, expected: Leaves, tolerance: float = 1e-10) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max()
        assert error <= tolerance * (1 + tensor.abs().max()), f"{name}: {error}"


@every_learner
def test_chunked_equals_reference_with_all_gradients(learner: InnerLearner) -> None:
    # Newton-Schulz multiplies differences near singular values of zero.
    tolerance = 1e-8 if learner.muon else 1e-10
    for number, extras in enumerate(extras_of(learner)):
        for size, length in ((1, 4), (3, 7), (9, 5)):
            problem = make_problem(learner, extras, size=size, length=length, seed=number, batch=1)
            expected, wanted = outcome(problem, backend="reference")
            found, gradients = outcome(problem, backend="chunked")
            assert_same(found, expected, tolerance)
            assert_same(gradients, wanted, tolerance)


LONG = [
    (InnerLearner(), ("decay", "momentum")),
    (InnerLearner(), ("channel_decay",)),
    (InnerLearner(order="apply-then-update"), ("token_scale",)),
    (InnerLearner(loss="dot"), ("channel_decay", "channel_removal_strength")),
    (InnerLearner(loss="dot"), ("decay", "removal_strength")),
    (InnerLearner(model="swiglu"), ("decay", "momentum")),
]


@pytest.mark.parametrize(("learner", "extras"), LONG)
@pytest.mark.parametrize(("size", "length"), [(1, 66), (3, 37), (16, 37), (40, 45)])
def test_several_chunks(
    learner: InnerLearner, extras: tuple[str, ...], size: int, length: int
) -> None:
    """Chunks of 32 tokens: whole ones, one that is short, and an open mini-batch."""
    problem = make_problem(learner, extras, size=size, length=length, batch=1, heads=1)
    expected, wanted = outcome(problem, backend="reference")
    found, gradients = outcome(problem, backend="chunked")
    assert_same(found, expected)
    assert_same(gradients, wanted)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_shape(data: st.DataObject) -> None:
    learner = data.draw(st.sampled_from([one for one in EVERY if not one.muon]))
    extras = data.draw(st.sampled_from(list(extras_of(learner))))
    problem = make_problem(
        learner,
        extras,
        size=data.draw(st.integers(1, 40)),
        length=data.draw(st.integers(1, 36)),
        batch=data.draw(st.integers(1, 2)),
        heads=data.draw(st.integers(1, 2)),
        width=data.draw(st.integers(1, 6)),
        seed=data.draw(st.integers(0, 99)),
    )
    if "decay" in problem.tokens:
        lowest = data.draw(st.sampled_from([1e-12, 1e-3, 0.5, 1.0]))
        problem.tokens["decay"].mul_(1 - lowest).add_(lowest)
    expected, _ = problem.run(backend="reference")
    found, _ = problem.run(backend="chunked")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("extras", [("decay", "momentum"), ("channel_decay",)])
def test_a_factor_may_be_zero(extras: tuple[str, ...]) -> None:
    """Forgetting all, as where a document ends, gives what a new sequence gives."""
    problem = make_problem(InnerLearner(), extras, size=1, length=40)
    problem.tokens["decay"][:, 17] = 0.0
    if "momentum" in problem.tokens:
        problem.tokens["momentum"][:, 17] = 0.0
    # Only the dot loss's writes do not look at what is forgotten in the same step.
    problem = replace(problem, learner=InnerLearner(loss="dot"))
    expected, wanted = outcome(problem, backend="reference")
    found, gradients = outcome(problem, backend="chunked")
    assert_same(found, expected)
    assert_same(gradients, wanted)
    new = replace(problem.part(17, 40), weights=tuple(map(torch.zeros_like, problem.weights)))
    torch.testing.assert_close(found["out"][:, 17:], new.run()[0], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("learner", "extras"), LONG)
@pytest.mark.parametrize("size", [1, 16])
def test_float32_is_as_exact_as_the_plain_form(
    learner: InnerLearner, extras: tuple[str, ...], size: int
) -> None:
    problem = make_problem(learner, extras, size=size, length=64, width=16, batch=1, heads=8)
    exact, _ = problem.run(backend="reference")
    single = problem.map(torch.Tensor.float)
    # Norms, for the largest of few rounding errors is a matter of luck.
    plain = (single.run(backend="reference")[0] - exact).norm()
    assert (single.run(backend="chunked")[0] - exact).norm() <= 2 * plain


def test_half_precision_is_computed_in_float32() -> None:
    problem = make_problem(InnerLearner(), ("decay",)).map(torch.Tensor.bfloat16)
    out, state = problem.run(output_final_state=True)
    assert out.dtype == torch.bfloat16
    assert state is not None and state.weights[0].dtype == torch.float32
    expected, _ = problem.map(torch.Tensor.float).run()
    torch.testing.assert_close(out, expected.bfloat16(), rtol=0, atol=0)


@every_learner
def test_inputs_are_left_alone_and_memory_is_filled(learner: InnerLearner) -> None:
    problem = make_problem(learner, tuple(extras_of(learner))[-1])
    copies = {name: tensor.clone() for name, tensor in problem.leaves().items()}
    expected, _ = problem.run()
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        found, _ = problem.run()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for name, tensor in problem.leaves().items():
        assert torch.equal(tensor, copies[name]), name


def test_without_gradients_nothing_is_recorded() -> None:
    for backend in ("reference", "chunked"):
        assert not make_problem(InnerLearner()).run(backend=backend)[0].requires_grad


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that operations produce."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.elements += tensor.numel()
        return found


@every_learner
def test_forward_and_backward_are_linear_in_the_length(learner: InnerLearner) -> None:
    extras = tuple(extras_of(learner))[-1]
    counts = []
    for length in (64, 128, 256):
        problem = make_problem(learner, extras, length=length, size=16, batch=1, heads=1)
        leaf = problem.map(lambda x: x.detach().requires_grad_())
        with Traffic() as traffic:
            torch.autograd.grad(
                leaf.run()[0].sum(), list(leaf.leaves().values()), allow_unused=True
            )
        counts.append(traffic.elements)
    # Twice the tokens more cost twice as much more; a square would be four times.
    assert counts[2] - counts[1] <= 2.05 * (counts[1] - counts[0])
