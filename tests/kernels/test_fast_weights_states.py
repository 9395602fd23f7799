"""What a sequence leaves behind, and input that no learner can take."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.fast_weights import InnerLearner, LearnerState, fast_weights
from ttt_adapt.kernels.fast_weights.problems import Leaves, extras_of, learners, make_problem

CAUSAL = [learner for learner in learners() if learner.causal]


def assert_same(found: Leaves, expected: Leaves, tolerance: float = 1e-10) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max()
        assert error <= tolerance * (1 + tensor.abs().max()), f"{name}: {error}"


@pytest.mark.parametrize("learner", CAUSAL, ids=str)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_any_cutting_gives_the_whole(learner: InnerLearner, backend: str) -> None:
    extras = tuple(extras_of(learner))[-1]
    problem = make_problem(learner, extras, length=13)
    whole, wanted = problem.run(backend=backend, output_final_state=True)
    assert wanted is not None and wanted.num_open == 1
    for cuts in ((1,), (4,), (6, 9), tuple(range(1, 13))):
        state: LearnerState | None = None
        parts = []
        for first, last in itertools.pairwise([0, *cuts, 13]):
            out, state = problem.part(first, last).run(
                backend=backend, initial_state=state, output_final_state=True
            )
            parts.append(out)
        assert state is not None
        found = {"out": torch.cat(parts, 1), **state.tensors()}
        # One row of a product is not summed in the order that many are.
        tolerance = 1e-8 if learner.muon else 1e-10
        assert_same(found, {"out": whole, **wanted.tensors()}, tolerance)


@pytest.mark.parametrize("cut", [4, 6])
def test_gradients_flow_through_states(cut: int) -> None:
    whole = make_problem(InnerLearner(), ("decay", "momentum"), length=11)
    whole = whole.map(lambda x: x.detach().requires_grad_())
    leaves = list(whole.leaves().values())
    expected = torch.autograd.grad(whole.run()[0].square().sum(), leaves)
    first, state = whole.part(0, cut).run(output_final_state=True)
    second, _ = whole.part(cut, 11).run(initial_state=state)
    found = torch.autograd.grad(first.square().sum() + second.square().sum(), leaves)
    names = list(whole.leaves())
    assert_same(dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True)))


def test_a_mini_batch_read_after_its_step_ends_with_the_sequence() -> None:
    learner = InnerLearner(step="mini-batch")
    problem = make_problem(learner, size=4, length=10)
    whole, final = problem.run(output_final_state=True)
    assert final is not None and final.num_open == 0
    first, state = problem.part(0, 8).run(output_final_state=True)
    second, again = problem.part(8, 10).run(initial_state=state, output_final_state=True)
    assert again is not None
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-13)
    assert_same(again.tensors(), final.tensors())
    open_state = problem.part(0, 10)
    causal = replace(open_state, learner=InnerLearner()).run(output_final_state=True)[1]
    with pytest.raises(OperatorInputError, match="between mini-batches"):
        problem.run(initial_state=causal)


def test_states_can_be_selected_saved_and_moved() -> None:
    learner = InnerLearner(
        model="swiglu", step="mini-batch", order="apply-then-update", normalize=True
    )
    problem = make_problem(learner, ("momentum",), length=10)
    _, state = problem.part(0, 7).run(output_final_state=True)
    assert state is not None and (state.num_rows, state.num_open) == (2, 3)
    again = LearnerState.from_tensors(state.clone().detach().to("cpu").tensors())
    rest = problem.part(7, 10)
    expected, _ = rest.run(initial_state=state)
    torch.testing.assert_close(rest.run(initial_state=again)[0], expected, rtol=0, atol=0)
    swapped = state.select(torch.tensor([1, 0]))
    turned = replace(rest, tokens={k: x.flip(0) for k, x in rest.tokens.items()})
    found, _ = turned.run(initial_state=swapped)
    torch.testing.assert_close(found.flip(0), expected, rtol=1e-12, atol=1e-13)


def test_weights_alone_are_a_state() -> None:
    problem = make_problem(InnerLearner(), ("decay",))
    rows = tuple(weight.expand(2, *weight.shape) for weight in problem.weights)
    expected, _ = problem.run()
    found, _ = replace(problem, weights=()).run(initial_state=rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


SWIGLU = InnerLearner(model="swiglu", loss="dot")
LARGE = InnerLearner(step="mini-batch")
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"model": "mlp"}, "expected model of linear, swiglu, found 'mlp'"),
    ({"loss": "l1"}, "expected loss of l2, dot, found 'l1'"),
    ({"step": "batch"}, "expected step of token, mini-batch, found 'batch'"),
    ({"order": "never"}, "expected order of update-then-apply, apply-then-update, found 'never'"),
    ({"muon": True}, "expected step='mini-batch' with muon, found step='token'"),
    ({"normalize": True}, "expected step='mini-batch' with normalize, found step='token'"),
]


@pytest.mark.parametrize(("chosen", "message"), BAD_SETTINGS)
def test_settings_that_cannot_be(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorInputError) as caught:
        InnerLearner(**chosen)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def ones(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5)


BTHD, BTH = (2, 6, 3, 4), (2, 6, 3)
MATRICES = (ones(3, 4, 5), ones(3, 5, 4), ones(3, 4, 5))
BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"q": ones(2, 6, 4)}, r"expected q [B, T, H, D], found [2, 6, 4]"),
    ({"q": ones(2, 0, 3, 4)}, "expected at least one row, token, head and dimension"),
    ({"q": ones(*BTHD).long()}, "expected a float dtype, found q in torch.int64"),
    ({"k": ones(2, 6, 3, 5)}, "expected k [2, 6, 3, 4], found [2, 6, 3, 5]"),
    (
        {"v": ones(*BTHD).double()},
        "expected q, k and v of one dtype, found q in torch.float32, v in",
    ),
    ({"k": ones(*BTHD) * torch.nan}, "expected finite values, found NaN or infinity in k"),
    ({"lr": ones(2, 6)}, "expected lr [2, 6, 3], found [2, 6]"),
    ({"lr": ones(*BTH, 3)}, "expected lr [2, 6, 3], found [2, 6, 3, 3]"),
    ({"lr": ones(*BTH).long()}, "expected lr in a float dtype, found torch.int64"),
    ({"lr": ones(*BTH).to("meta")}, "expected all tensors on cpu, found lr on meta"),
    ({"mini_batch_size": 0}, "expected a mini_batch_size of at least 1, found 0"),
    ({"backend": "triton"}, "expected a backend of auto, reference, chunked, found 'triton'"),
    ({"decay": ones(2, 6, 3, 5)}, "expected decay [2, 6, 3] or [2, 6, 3, 4], found [2, 6, 3, 5]"),
    ({"decay": 3 * ones(*BTH)}, "expected decay between 0 and 1, found 1.5 to 1.5"),
    ({"momentum": -ones(*BTH)}, "expected momentum between 0 and 1, found -0.5 to -0.5"),
    ({"momentum": ones(*BTHD)}, "expected momentum [2, 6, 3], found [2, 6, 3, 4]"),
    ({"momentum": ones(*BTH), "decay": ones(*BTHD)}, "expected decay [B, T, H] with momentum"),
    ({"removal_key": ones(*BTHD)}, "together, found removal_key alone"),
    (
        {"removal_key": ones(*BTHD), "removal_strength": ones(*BTH)},
        "expected model='linear' and loss='dot' with removal_key, found model='linear' and loss='l2'",
    ),
    ({"token_scale": ones(3)}, "expected token_scale [4], found [3]"),
    ({"token_scale": ones(4), "decay": ones(*BTH)}, "with token_scale, found step='token' and ['d"),
    ({"token_scale": ones(4), "learner": LARGE}, "with token_scale, found step='mini-batch'"),
    ({"weights": ones(3, 4, 5)}, "expected weights[0] [3, 4, 4], found [3, 4, 5]"),
    ({"weights": MATRICES}, "expected weights of 1 matrices for the linear model, found 3"),
    ({"learner": SWIGLU}, "expected weights with the swiglu model, found None"),
    ({"learner": SWIGLU, "weights": MATRICES[:2]}, "expected weights of 3 matrices for the swiglu"),
    ({"learner": SWIGLU, "weights": MATRICES[:1] * 3}, "expected weights[1] [3, 5, 4], found"),
    (
        {"learner": SWIGLU, "weights": MATRICES, "decay": ones(*BTHD)},
        "expected model='linear' with decay for each channel, found 'swiglu'",
    ),
    (
        {"initial_state": (ones(3, 4, 4),)},
        "expected initial_state[0] [2, 3, 4, 4], found [3, 4, 4]",
    ),
    ({"initial_state": "state"}, "or a tuple of weights, found a str"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_INPUTS)
def test_input_that_cannot_be_taken(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {name: ones(*BTHD) for name in ("q", "k", "v")}
    given |= {"lr": ones(*BTH), "mini_batch_size": 4} | changed
    with pytest.raises(OperatorInputError) as caught:
        fast_weights(**given)
    found = str(caught.value)
    assert found.startswith("fast_weights: ") and message in found and "\n" not in found


BAD_STATES: list[tuple[InnerLearner, tuple[str, ...], int, int, str]] = [
    (SWIGLU, (), 2, 4, "expected a state with weights of 1 matrices for the linear model, found 3"),
    (InnerLearner(), (), 1, 4, "expected a state with weights[0] [2, 2, 5, 5], found [1, 2, 5, 5]"),
    (InnerLearner(), ("momentum",), 2, 4, "expected a state without momentum, found one with"),
    (
        InnerLearner(step="mini-batch", normalize=True),
        (),
        2,
        4,
        "expected a state without norms, found one with;",
    ),
    (
        InnerLearner(),
        (),
        2,
        9,
        "expected a state with fewer than 4 open tokens, the mini_batch_size",
    ),
    (InnerLearner(), ("decay",), 2, 4, "expected open tokens with k, lr, v, found decay, k, lr, v"),
]


@pytest.mark.parametrize(("learner", "extras", "batch", "size", "message"), BAD_STATES)
def test_a_state_of_another_learner(
    learner: InnerLearner, extras: tuple[str, ...], batch: int, size: int, message: str
) -> None:
    other = make_problem(learner, extras, batch=batch, size=size, length=7)
    _, state = other.run(output_final_state=True)
    with pytest.raises(OperatorInputError) as caught:
        make_problem(InnerLearner(), size=4, length=7).run(initial_state=state)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_open_tokens_of_another_kind() -> None:
    learner = InnerLearner(loss="dot")
    _, state = make_problem(learner, ("channel_decay",), length=7).run(output_final_state=True)
    with pytest.raises(OperatorInputError, match="open tokens with decay of"):
        make_problem(learner, ("decay",), length=7).run(initial_state=state)
