"""What callers may get wrong, found before any arithmetic, said in one line.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, M matrices.
"""

from collections.abc import Mapping

import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.fast_weights.learner import (
    NAME,
    Carried,
    InnerLearner,
    LearnerState,
    Tensors,
)
from ttt_adapt.kernels.inner_loop.checks import FLOATS, require_shape, require_values

BACKENDS = ("auto", "reference", "chunked")


def check_settings(
    learner: InnerLearner,
    given: Mapping[str, torch.Tensor | None],
    mini_batch_size: int,
    backend: str,
) -> None:
    """Settings that exclude each other or need each other.

    Args:
        given: the optional tensors by name.

    Raises:
        OperatorInputError: with what was expected and what was found.
    """
    used = {name for name, tensor in given.items() if tensor is not None}
    if backend not in BACKENDS:
        raise OperatorInputError(
            f"{NAME}: expected a backend of {', '.join(BACKENDS)}, found {backend!r}"
        )
    if mini_batch_size < 1:
        raise OperatorInputError(
            f"{NAME}: expected a mini_batch_size of at least 1, found {mini_batch_size}"
        )
    removal = used & {"removal_key", "removal_strength"}
    if len(removal) == 1:
        raise OperatorInputError(
            f"{NAME}: expected removal_key and removal_strength together, found {removal.pop()} alone"
        )
    if removal and (learner.model, learner.loss) != ("linear", "dot"):
        raise OperatorInputError(
            f"{NAME}: expected model='linear' and loss='dot' with removal_key, found "
            f"model={learner.model!r} and loss={learner.loss!r}; the l2 loss removes along k itself"
        )
    if "token_scale" in used and (learner.step != "token" or used & {"decay", "momentum"}):
        raise OperatorInputError(
            f"{NAME}: expected step='token' without decay or momentum with token_scale, found "
            f"step={learner.step!r} and {sorted(used - {'token_scale'}) or 'neither'}"
        )
    decay = given.get("decay")
    if decay is not None and decay.ndim == 4:
        if learner.model != "linear":
            raise OperatorInputError(
                f"{NAME}: expected model='linear' with decay for each channel, found "
                f"{learner.model!r}; give decay [B, T, H]"
            )
        if "momentum" in used and learner.step == "token":
            raise OperatorInputError(
                f"{NAME}: expected decay [B, T, H] with momentum, found one for each channel; "
                "their product has no short form"
            )


def check_tokens(
    learner: InnerLearner,
    tokens: Mapping[str, torch.Tensor],
    token_scale: torch.Tensor | None,
    mini_batch_size: int,
    *,
    check_finite: bool,
) -> None:
    """Ranks, shapes, dtypes, devices, and on a CPU that factors lie in [0, 1] and, if
    ``check_finite``, values are finite.

    Raises:
        OperatorInputError: with what was expected and what was found.
    """
    q = tokens["q"]
    if q.ndim != 4:
        raise OperatorInputError(f"{NAME}: expected q [B, T, H, D], found {list(q.shape)}")
    if 0 in q.shape:
        raise OperatorInputError(
            f"{NAME}: expected at least one row, token, head and dimension, found {list(q.shape)}; "
            "leave empty sequences out"
        )
    if q.dtype not in FLOATS:
        raise OperatorInputError(f"{NAME}: expected a float dtype, found q in {q.dtype}")
    narrow, wide = tuple(q.shape[:3]), tuple(q.shape)
    several = (*narrow, learner.num_weights)
    allowed = {
        "lr": {narrow, several} if learner.num_weights > 1 else {narrow},
        "decay": {narrow, wide},
        "momentum": {narrow},
        "removal_strength": {narrow, wide},
    }
    for key, tensor in tokens.items():
        shapes = allowed.get(key, {wide})
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in sorted(shapes, key=len))
            raise OperatorInputError(f"{NAME}: expected {key} {wanted}, found {list(tensor.shape)}")
        if key in ("k", "v") and tensor.dtype != q.dtype:
            raise OperatorInputError(
                f"{NAME}: expected q, k and v of one dtype, found q in {q.dtype}, {key} in "
                f"{tensor.dtype}; cast them"
            )
        require_values(NAME, key, tensor, q.device, check_finite=check_finite)
    for key in ("decay", "momentum"):
        factor = tokens.get(key)
        if factor is None or factor.device.type != "cpu":
            continue
        low, high = (float(bound) for bound in factor.detach().aminmax())
        if low < 0 or high > 1:
            raise OperatorInputError(
                f"{NAME}: expected {key} between 0 and 1, found {low:.4g} to {high:.4g}"
            )
    if token_scale is not None:
        require_shape(NAME, "token_scale", token_scale, (mini_batch_size,))
        require_values(NAME, "token_scale", token_scale, q.device, check_finite=check_finite)


def check_weights(
    learner: InnerLearner,
    weights: Tensors,
    q: torch.Tensor,
    key: str,
    *,
    by_row: bool,
    check_finite: bool,
) -> None:
    """The inner model's matrices ``[H, ...]``, or ``[B, H, ...]`` if they are ``by_row``.

    Raises:
        OperatorInputError: with what was expected and what was found.
    """
    batch, _, heads, width = q.shape
    lead = (batch, heads) if by_row else (heads,)
    if len(weights) != learner.num_weights:
        raise OperatorInputError(
            f"{NAME}: expected {key} of {learner.num_weights} matrices for the {learner.model} "
            f"model, found {len(weights)}"
        )
    hidden = weights[0].shape[-1] if learner.num_weights > 1 and weights[0].ndim else width
    shapes = [(*lead, width, hidden), (*lead, hidden, width), (*lead, width, hidden)]
    for number, (weight, shape) in enumerate(zip(weights, shapes, strict=False)):
        require_shape(NAME, f"{key}[{number}]", weight, shape)
        require_values(NAME, f"{key}[{number}]", weight, q.device, check_finite=check_finite)


def check_state(
    learner: InnerLearner,
    state: LearnerState,
    tokens: Mapping[str, torch.Tensor],
    mini_batch_size: int,
    *,
    check_finite: bool,
) -> Carried:
    """A state handed in: of this learner, these sizes, these settings.

    Raises:
        OperatorInputError: a state of another learner, batch, mini-batch size or other gates.
    """
    carried, own = state.carried, "a state fits only the learner that made it"
    check_weights(
        learner,
        carried.weights,
        tokens["q"],
        "a state with weights",
        by_row=True,
        check_finite=check_finite,
    )
    for key, found, wanted in (
        ("momentum", bool(carried.momentum), "momentum" in tokens),
        ("norms", bool(carried.norms), learner.normalize),
    ):
        if found != wanted:
            has = {True: "with", False: "without"}
            raise OperatorInputError(
                f"{NAME}: expected a state {has[wanted]} {key}, found one {has[found]}; {own}"
            )
    if state.open_tokens is None:
        return carried
    if not learner.causal:
        raise OperatorInputError(
            f"{NAME}: expected a state between mini-batches when a mini-batch is read only after "
            f"its step, found {state.num_open} open tokens; {own}"
        )
    if state.num_open >= mini_batch_size:
        raise OperatorInputError(
            f"{NAME}: expected a state with fewer than {mini_batch_size} open tokens, the "
            f"mini_batch_size, found {state.num_open}; {own}"
        )
    found_names, wanted_names = set(state.open_tokens.named()), set(tokens) - {"q"}
    if found_names != wanted_names:
        raise OperatorInputError(
            f"{NAME}: expected open tokens with {', '.join(sorted(wanted_names))}, found "
            f"{', '.join(sorted(found_names))}; {own}"
        )
    for name, tensor in state.open_tokens.named().items():
        if tensor.ndim != tokens[name].ndim or tensor.shape[2:] != tokens[name].shape[2:]:
            raise OperatorInputError(
                f"{NAME}: expected open tokens with {name} of {list(tokens[name].shape[2:])} each, "
                f"found {list(tensor.shape[2:])}; {own}"
            )
    return carried
