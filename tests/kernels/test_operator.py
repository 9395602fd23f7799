"""The operators whole: every backend against the per-token reference, in float64 on a CPU."""

import itertools

import pytest
import torch

from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.problems import OPERATORS, Problem, make_problem

LENGTHS = [1, 3, 4, 7, 8, 21]


def gradients_of(problem: Problem, **options: object) -> dict[str, torch.Tensor]:
    """Gradients of a fixed mixture of outputs and final state with respect to every input."""
    leaf = problem.learnable()
    out, final = leaf.run(output_final_state=True, **options)
    assert final is not None
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in (out, *final.weights, *final.slots):
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        total = total + (tensor * weights).sum()
    leaves = leaf.leaves()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(leaves.items(), found, strict=True)
    }


def assert_states_equal(found: FastWeightState, expected: FastWeightState) -> None:
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_chunked_equals_reference(operator: str, length: int, causal: bool) -> None:
    problem = make_problem(operator, length=length)
    expected, expected_state = problem.run(
        backend="reference", causal=causal, output_final_state=True
    )
    found, state = problem.run(backend="chunked", causal=causal, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert state is not None and expected_state is not None
    assert_states_equal(state, expected_state)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("length", [3, 8, 10])
@pytest.mark.parametrize("causal", [True, False])
def test_all_gradients_equal_the_reference_s(operator: str, length: int, causal: bool) -> None:
    problem = make_problem(operator, length=length)
    expected = gradients_of(problem, backend="reference", causal=causal)
    found = gradients_of(problem, backend="chunked", causal=causal)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("cuts", [(1,), (4,), (6, 9), (3, 4, 5, 17), tuple(range(1, 21))])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_any_cutting_gives_the_whole(operator: str, cuts: tuple[int, ...], backend: str) -> None:
    problem = make_problem(operator)
    whole, expected_state = problem.run(backend=backend, output_final_state=True)
    bounds = [0, *cuts, 21]
    state: FastWeightState | None = None
    parts = []
    for first, last in itertools.pairwise(bounds):
        out, state = problem.part(first, last).run(
            backend=backend, initial_state=state, output_final_state=True
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-11)
    assert state is not None and expected_state is not None
    assert_states_equal(state, expected_state)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_flow_through_states(operator: str) -> None:
    whole = make_problem(operator, length=11).learnable()
    out, _ = whole.run(backend="chunked")
    expected = torch.autograd.grad(out.square().sum(), list(whole.leaves().values()))
    first, state = whole.part(0, 6).run(backend="chunked", output_final_state=True)
    second, _ = whole.part(6, 11).run(backend="chunked", initial_state=state)
    total = first.square().sum() + second.square().sum()
    # The parameters are given again but not used where a state is.
    found = torch.autograd.grad(total, list(whole.leaves().values()))
    for name, one, other in zip(whole.leaves(), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padded_equals_unpadded(operator: str, side: str) -> None:
    lengths = [5, 13]
    problem = make_problem(operator, length=13)
    mask = torch.ones(2, 13)
    if side == "left":
        mask[0, :8] = 0
    elif side == "right":
        mask[0, 5:] = 0
    else:
        mask[0] = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0])
    out, state = problem.run(backend="chunked", attention_mask=mask, output_final_state=True)
    assert state is not None
    for row, length in enumerate(lengths):
        kept = mask[row].bool()
        alone = Problem(
            operator,
            {k: v[row : row + 1][:, kept] for k, v in problem.tokens.items()},
            problem.shared,
            problem.mini_batch_size,
        )
        assert alone.tokens["q"].shape[1] == length
        expected, final = alone.run(backend="reference", output_final_state=True)
        torch.testing.assert_close(out[row : row + 1][:, kept], expected, rtol=1e-9, atol=1e-11)
        assert bool((out[row][~kept] == 0).all())
        assert final is not None
        assert_states_equal(state.select(torch.tensor([row])), final)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_of_different_offsets_go_on_together(operator: str) -> None:
    problem = make_problem(operator, batch=3, length=24)
    mask = torch.ones(3, 10)
    mask[0, :7] = 0
    mask[1, :2] = 0
    first, state = problem.part(0, 10).run(
        backend="chunked", attention_mask=mask, output_final_state=True
    )
    outs = [first]
    for start, end in ((10, 11), (11, 12), (12, 18), (18, 24)):
        out, state = problem.part(start, end).run(
            backend="chunked", initial_state=state, output_final_state=True
        )
        outs.append(out)
    found = torch.cat(outs, 1)
    whole = torch.cat([mask, torch.ones(3, 14)], 1)
    expected, final = problem.run(
        backend="reference", attention_mask=whole, output_final_state=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert state is not None and final is not None
    assert_states_equal(state, final)


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_equals_one_by_one(operator: str) -> None:
    problem = make_problem(operator, batch=1, length=19)
    bounds = [0, 4, 5, 12, 19]
    out, state = problem.run(backend="chunked", cu_seqlens=bounds, output_final_state=True)
    assert state is not None and state.num_rows == 4
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        expected, final = problem.part(first, last).run(
            backend="reference", output_final_state=True
        )
        torch.testing.assert_close(out[:, first:last], expected, rtol=1e-9, atol=1e-11)
        assert final is not None
        assert_states_equal(state.select(torch.tensor([row])), final)
