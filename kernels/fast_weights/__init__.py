"""The family of inner learners that TTT layers belong to: fast weights without layer norm.

    from ttt_adapt.kernels.fast_weights import InnerLearner, fast_weights

    out, state = fast_weights(q, k, v, lr=beta, mini_batch_size=1)               # the delta rule
    learner = InnerLearner(model="swiglu", loss="dot", step="mini-batch", muon=True)
    out, state = fast_weights(q, k, v, lr=lr, learner=learner, mini_batch_size=2048, weights=w)

Linear attention, DeltaNet, Gated DeltaNet, RWKV-7, Titans and LaCT by their own names and symbols:
``family.py``. Two backends that agree (``reference``, ``chunked``); see README.md.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch.
"""

import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.fast_weights.checks import (
    check_settings,
    check_state,
    check_tokens,
    check_weights,
)
from ttt_adapt.kernels.fast_weights.learner import (
    NAME,
    Carried,
    Core,
    InnerLearner,
    LearnerState,
    Tensors,
    Tokens,
)
from ttt_adapt.kernels.fast_weights.steps import channel_norms

__all__ = ["InnerLearner", "LearnerState", "fast_weights"]

_LINEAR = InnerLearner()


def fast_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: torch.Tensor,
    learner: InnerLearner = _LINEAR,
    mini_batch_size: int = 16,
    weights: Tensors | torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    momentum: torch.Tensor | None = None,
    removal_key: torch.Tensor | None = None,
    removal_strength: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    initial_state: LearnerState | Tensors | None = None,
    output_final_state: bool = False,
    check_finite: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, LearnerState | None]:
    """Sequence layer whose hidden state is a model ``f``, trained on the tokens it reads.

    Within a mini-batch that starts with weights P, token t's gradient is ``∂ℓ_t/∂P``, and

        S_t = momentum_t S_(t−1) − lr_t ∂ℓ_t/∂P,    W_t = decay_t W_(t−1) + S_t,    out_t = f(q_t; W_t)

    README.md has every setting's equations, and which of them make which published layer.

    Args:
        q: ``[B, T, H, D]``, float16, bfloat16, float32 or float64; k, v alike. What is learned is
            to answer k with v; nothing is normalised or scaled here.
        lr: ``[B, T, H]``; for SwiGLU also ``[B, T, H, 3]``, a rate for each of W1, W2, W3.
        learner: the model, its loss, its step and the order of update and answer.
        mini_batch_size: b; a last mini-batch may be shorter.
        weights: where a sequence begins: W ``[H, D, D]``, zero if ``None``; for SwiGLU
            ``(W1 [H, D, F], W2 [H, F, D], W3 [H, D, F])``.
        decay: ``[B, T, H]``, or for each channel of the keys ``[B, T, H, D]``, between 0 and 1.
        momentum: ``[B, T, H]``, between 0 and 1.
        removal_key: ``[B, T, H, D]``, r; with it what W holds at r is removed: the gradient gets
            ``(strength ∘ r)ᵀ (r P)`` in addition. Linear model with ``loss="dot"``.
        removal_strength: ``[B, T, H]``, or for each channel ``[B, T, H, D]``.
        token_scale: ``[mini_batch_size]``, s: ``W_t = P − s_t Σ_(j≤t) lr_j ∂ℓ_j/∂P``, as in TTT.
        initial_state: where to go on: a state of an earlier call, at any offset; or weights
            ``[B, H, ...]`` alone. ``None``: ``weights``.
        output_final_state: whether to return the state after the last token.
        check_finite: whether NaN and infinity are refused, on a CPU (on an accelerator, looking
            would mean waiting). ``False``: they spread from where they stand, within their row.
        backend: ``auto`` (``chunked``), ``reference`` or ``chunked``.

    Returns:
        ``[B, T, H, D]`` in q's dtype, and the final state (float32 inside, float64 for float64
        inputs; gradients flow through both states), or ``None``.

    Raises:
        OperatorInputError: settings that exclude each other; shapes, dtypes, devices or values that
            do not fit; another learner's state.

    Source: Sun et al. 2024 (arXiv 2407.04620), sections 2.4 to 2.6, and the papers in README.md.
    """
    optional = {
        "decay": decay,
        "momentum": momentum,
        "removal_key": removal_key,
        "removal_strength": removal_strength,
    }
    check_settings(learner, {**optional, "token_scale": token_scale}, mini_batch_size, backend)
    used = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_tokens(
        learner,
        {"q": q, "k": k, "v": v, "lr": lr, **used},
        token_scale,
        mini_batch_size,
        check_finite=check_finite,
    )
    if lr.ndim == 3:
        lr = lr[..., None].expand(*lr.shape, learner.num_weights)
    if removal_strength is not None and removal_strength.ndim == 3:
        used["removal_strength"] = removal_strength[..., None].expand_as(q)
    new = Tokens(k, v, lr, **used)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens, earlier = new, 0
    if isinstance(initial_state, LearnerState):
        named = {"q": q, **new.named()}
        carried = check_state(
            learner, initial_state, named, mini_batch_size, check_finite=check_finite
        ).to(dtype)
        earlier = initial_state.num_open
        if initial_state.open_tokens is not None:
            tokens = new.after(initial_state.open_tokens)
    else:
        start = _start(learner, weights, initial_state, q, dtype, check_finite=check_finite)
        carried = Carried(
            start,
            tuple(map(torch.zeros_like, start)) if momentum is not None else (),
            tuple(map(channel_norms, start)) if learner.normalize else (),
        )
    scale = None if token_scale is None else token_scale.to(dtype)
    core = _core("chunked" if backend == "auto" else backend)
    computed = tokens.map(lambda tensor: tensor.to(dtype))
    out, end = core(learner, q.to(dtype), computed, scale, carried, mini_batch_size)
    if not output_final_state:
        return out.to(q.dtype), None
    num_tokens = earlier + q.shape[1]
    num_open = num_tokens % mini_batch_size if learner.causal else 0
    if not num_open:
        return out.to(q.dtype), LearnerState(end)
    # Copies, lest a few open tokens keep the whole sequence's memory.
    left = tokens.part(num_tokens - num_open, num_tokens).map(torch.Tensor.clone)
    return out.to(q.dtype), LearnerState(end, left)


def _start(
    learner: InnerLearner,
    weights: Tensors | torch.Tensor | None,
    initial_state: Tensors | None,
    q: torch.Tensor,
    dtype: torch.dtype,
    *,
    check_finite: bool,
) -> Tensors:
    """The weights each row begins with, ``[B, H, ...]``."""
    batch, _, heads, width = q.shape
    if initial_state is not None:
        if not isinstance(initial_state, (tuple, list)):
            raise OperatorInputError(
                f"{NAME}: expected initial_state of an earlier call or a tuple of weights, found a "
                f"{type(initial_state).__name__}"
            )
        check_weights(
            learner, initial_state, q, "initial_state", by_row=True, check_finite=check_finite
        )
        return tuple(weight.to(dtype) for weight in initial_state)
    if weights is None:
        if learner.model != "linear":
            raise OperatorInputError(
                f"{NAME}: expected weights with the {learner.model} model, found None; from zero "
                "weights it cannot learn"
            )
        weights = q.new_zeros(heads, width, width, dtype=dtype)
    given = (weights,) if isinstance(weights, torch.Tensor) else tuple(weights)
    check_weights(learner, given, q, "weights", by_row=False, check_finite=check_finite)
    return tuple(weight.to(dtype).expand(batch, *weight.shape) for weight in given)


def _core(backend: str) -> Core:
    # Imported when used: the reference is for tests.
    if backend == "reference":
        from ttt_adapt.kernels.fast_weights import reference

        return reference.core
    from ttt_adapt.kernels.fast_weights import chunked

    return chunked.core
