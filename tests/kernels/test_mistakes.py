"""What callers get wrong: one line that says what was expected and what was found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.problems import OPERATORS, Problem, make_problem


def with_token(problem: Problem, name: str, value: torch.Tensor) -> Problem:
    return replace(problem, tokens={**problem.tokens, name: value})


def with_shared(problem: Problem, name: str, value: torch.Tensor) -> Problem:
    return replace(problem, shared={**problem.shared, name: value})


def poisoned(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda p: p.part(0, 0), {}, r"at least one row, token, head and dimension, found \[2, 0"),
        (lambda p: with_token(p, "q", p.tokens["q"][0]), {}, r"expected q \[B, T, H, D\], found"),
        (lambda p: with_token(p, "k", p.tokens["k"][..., :4]), {}, r"expected k \[2, 7, 2, 8\]"),
        (lambda p: with_token(p, "v", p.tokens["v"].float()), {}, r"of one dtype, found q in"),
        (lambda p: p.to(torch.int64), {}, r"expected a float dtype, found q in torch.int64"),
        (lambda p: with_token(p, "lr", p.tokens["lr"][:, :3]), {}, r"expected lr \[2, 7, 2\]"),
        (lambda p: with_token(p, "v", poisoned(p.tokens["v"], torch.nan)), {}, r"in v"),
        (lambda p: with_token(p, "k", poisoned(p.tokens["k"], torch.inf)), {}, r"finite.* in k"),
        (lambda p: with_shared(p, "ln_weight", torch.ones(3, 8)), {}, r"ln_weight \[2, 8\]"),
        (lambda p: with_shared(p, "token_scale", torch.ones(5)), {}, r"\[4\], the mini_batch_size"),
        (lambda p: p, {"backend": "cuda"}, r"expected a backend of .*, found 'cuda'"),
        (lambda p: p, {"attention_mask": torch.ones(2, 6)}, r"attention_mask \[2, 7\], found"),
        (lambda p: p, {"cu_seqlens": [0, 7]}, r"one row when packed, found 2 rows"),
        (
            lambda p: p,
            {"cu_seqlens": [0, 7], "attention_mask": torch.ones(2, 7)},
            r"attention_mask or cu_seqlens, found both",
        ),
    ],
)
def test_bad_tensors(operator: str, change: Any, options: dict[str, Any], message: str) -> None:
    problem = make_problem(operator, length=7)
    with pytest.raises(OperatorInputError, match=message) as caught:
        change(problem).run(**options)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(operator)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("bounds", [[0, 3], [1, 7], [0, 5, 3, 7], [0, 3, 3, 7], [7]])
def test_bad_bounds(operator: str, bounds: list[int]) -> None:
    problem = make_problem(operator, batch=1, length=7)
    with pytest.raises(OperatorInputError, match=r"cu_seqlens that ascend from 0 to 7, found"):
        problem.run(cu_seqlens=bounds)


@pytest.mark.parametrize("operator", OPERATORS)
def test_states_of_others(operator: str) -> None:
    problem = make_problem(operator, length=7)
    _, state = problem.run(output_final_state=True)
    other = OPERATORS[1 - OPERATORS.index(operator)]
    cases: list[tuple[Problem, dict[str, Any], str]] = [
        (make_problem(other, length=7), {}, r"expected a state of .*that made it"),
        (make_problem(operator, size=8), {}, r"mini-batches of 8, found 4"),
        (make_problem(operator, batch=3), {}, r"fits only the model and batch"),
        (make_problem(operator, width=16), {}, r"expected a state with weights"),
        (problem.float(), {}, r"expected a state in torch.float32, found torch.float64"),
        (problem, {"causal": False}, r"between mini-batches when not causal"),
    ]
    for changed, options, message in cases:
        with pytest.raises(OperatorInputError, match=message):
            changed.run(initial_state=state, **options)


@pytest.mark.parametrize("operator", OPERATORS)
def test_initial_weights_of_another_shape(operator: str) -> None:
    problem = make_problem(operator, length=7)
    _, state = problem.run(output_final_state=True)
    assert state is not None
    first, *rest = state.weights
    with pytest.raises(OperatorInputError, match=r"expected initial w\w* \[2, 2, 8"):
        problem.run(initial_state=(first[:, :1], *rest))
    with pytest.raises(OperatorInputError, match=r"of \d weights \(w\w*, b\w*.*\), found 1"):
        problem.run(initial_state=(first,))


@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_spreads_within_its_row_when_nobody_looks(operator: str) -> None:
    problem = make_problem(operator, length=9)
    expected, after = problem.run(output_final_state=True)
    bad = problem.tokens["v"].clone()
    bad[1, 5] = torch.nan
    changed = with_token(problem, "v", bad)
    out, state = changed.run(output_final_state=True, check_finite=False)
    assert state is not None and after is not None
    torch.testing.assert_close(out[0], expected[0])
    torch.testing.assert_close(state.weights[0][0], after.weights[0][0])
    assert bool(out[1, 5:].isnan().all()) and bool(state.weights[0][1].isnan().all())
