"""One call of a TTT operator: checks, the state it begins with, the backend, the operator.

The public functions of ``ttt_linear`` and ``ttt_mlp`` differ in their parameters' names and shapes
alone; what they do with them is this.

Shape legend: B rows, H heads, D head width, b tokens in a mini-batch, N packed sequences.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.backends import choose_backend
from ttt_adapt.kernels.inner_loop.checks import (
    check_rows,
    check_state,
    check_tokens,
    check_weights,
    require_shape,
)
from ttt_adapt.kernels.inner_loop.counting import core_of, counted
from ttt_adapt.kernels.inner_loop.models import InnerModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.operator import Decode, run_operator
from ttt_adapt.kernels.inner_loop.state import FastWeightState


def call_operator(
    inner: InnerModel,
    tokens: Tokens,
    shared: Shared,
    parameters: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]],
    *,
    hidden: int = 0,
    mini_batch_size: int,
    initial_state: FastWeightState | Tensors | None,
    output_final_state: bool,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    causal: bool,
    check_finite: bool,
    backend: str,
) -> tuple[torch.Tensor, FastWeightState | None]:
    """What the public functions document; ``parameters`` are W0 by name, ``[H, ...]``, with the shape
    each must have, and ``hidden`` the width that Triton streams in blocks, if there is one.

    Raises:
        OperatorInputError: shapes, dtypes, devices or values that do not fit, or another
            operator's state.
    """
    q, name = tokens.q, inner.name
    check_tokens(name, tokens, shared, check_finite=check_finite)
    if shared.token_scale.shape[0] != mini_batch_size:
        raise OperatorInputError(
            f"{name}: expected token_scale [{mini_batch_size}], the mini_batch_size, found "
            f"{list(shared.token_scale.shape)}"
        )
    check_weights(name, parameters, q.device)
    rows = check_rows(name, q, attention_mask, cu_seqlens)
    num_rows = q.shape[0] if rows is None else int(rows.lengths.shape[0])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    start = tuple(
        tensor.to(dtype).expand(num_rows, *tensor.shape) for tensor, _ in parameters.values()
    )
    state: FastWeightState | Tensors = start
    if isinstance(initial_state, FastWeightState):
        state = check_state(inner, initial_state, start, mini_batch_size, causal)
    elif initial_state is not None:
        state = _initial_weights(name, initial_state, dict(zip(parameters, start, strict=True)))
    chosen = choose_backend(
        name, backend, q, causal=causal, mini_batch_size=mini_batch_size, hidden=hidden
    )
    core = counted(core_of(name, chosen), name, chosen)
    decode: Decode | None = None
    if chosen == "triton":
        decode = import_module(f"ttt_adapt.kernels.{name}.decode").decode
    return run_operator(
        inner,
        core,
        tokens,
        shared,
        state,
        rows=rows,
        causal=causal,
        output_final_state=output_final_state,
        decode=decode,
    )


def _initial_weights(name: str, given: Tensors, like: Mapping[str, torch.Tensor]) -> Tensors:
    """Weights alone as a state, ``[B, H, ...]`` each."""
    if len(given) != len(like):
        raise OperatorInputError(
            f"{name}: expected an initial state of {len(like)} weights ({', '.join(like)}), found "
            f"{len(given)}"
        )
    for (key, wanted), tensor in zip(like.items(), given, strict=True):
        require_shape(name, f"initial {key}", tensor, tuple(wanted.shape))
    return tuple(
        tensor.to(wanted.dtype) for tensor, wanted in zip(given, like.values(), strict=True)
    )
