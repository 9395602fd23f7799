"""What callers may get wrong, found before any arithmetic, said in one line.

Shape legend: B rows, T tokens, H heads, D head width, b tokens in a mini-batch, N packed sequences.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.models import InnerModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.rows import Rows, rows_of_mask, rows_of_packed
from ttt_adapt.kernels.inner_loop.state import FastWeightState

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tokens(
    name: str,
    tokens: Tokens,
    shared: Shared,
    *,
    check_finite: bool = True,
) -> None:
    """Ranks, shapes, dtypes, devices, and on a CPU that the values are finite, if asked to look.

    Raises:
        OperatorInputError: with what was expected and what was found.
    """
    q, k, v, lr = tokens
    token_scale, ln_weight, ln_bias = shared
    if q.ndim != 4:
        raise OperatorInputError(f"{name}: expected q [B, T, H, D], found {list(q.shape)}")
    batch, num_tokens, heads, width = q.shape
    if 0 in q.shape:
        raise OperatorInputError(
            f"{name}: expected at least one row, token, head and dimension, found {list(q.shape)}; "
            "leave empty sequences out"
        )
    if q.dtype not in FLOATS:
        raise OperatorInputError(f"{name}: expected a float dtype, found q in {q.dtype}")
    if token_scale.ndim != 1 or not token_scale.numel():
        raise OperatorInputError(
            f"{name}: expected token_scale [mini_batch_size], found {list(token_scale.shape)}"
        )
    expected = {
        "k": (k, (batch, num_tokens, heads, width)),
        "v": (v, (batch, num_tokens, heads, width)),
        "lr": (lr, (batch, num_tokens, heads)),
        "ln_weight": (ln_weight, (heads, width)),
        "ln_bias": (ln_bias, (heads, width)),
    }
    for key, (tensor, shape) in expected.items():
        require_shape(name, key, tensor, shape)
    for key, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise OperatorInputError(
                f"{name}: expected q, k and v of one dtype, found q in {q.dtype}, {key} in "
                f"{tensor.dtype}; cast them"
            )
    named = {"q": q, "k": k, "v": v, "lr": lr, "token_scale": token_scale}
    for key, tensor in named.items():
        require_values(name, key, tensor, q.device, check_finite=check_finite)


def require_values(
    name: str, key: str, tensor: torch.Tensor, device: torch.device, *, check_finite: bool
) -> None:
    """Numbers of a float dtype on ``device``, and on a CPU finite ones if ``check_finite``.

    Raises:
        OperatorInputError: with what was expected and what was found.
    """
    if not tensor.is_floating_point():
        raise OperatorInputError(f"{name}: expected {key} in a float dtype, found {tensor.dtype}")
    if tensor.device != device:
        raise OperatorInputError(
            f"{name}: expected all tensors on {device}, found {key} on {tensor.device}"
        )
    # On an accelerator looking would mean waiting; there the models' NaN guard looks.
    if (
        check_finite
        and tensor.device.type == "cpu"
        and not bool(tensor.detach().sum().isfinite())  # may also have overflowed
        and not bool(tensor.detach().isfinite().all())
    ):
        raise OperatorInputError(f"{name}: expected finite values, found NaN or infinity in {key}")


def check_weights(
    name: str, named: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], device: torch.device
) -> None:
    """The inner model's parameters ``[H, ...]``: shapes and device.

    Raises:
        OperatorInputError: with what was expected and what was found.
    """
    for key, (tensor, shape) in named.items():
        require_shape(name, key, tensor, shape)
        if tensor.device != device:
            raise OperatorInputError(
                f"{name}: expected all tensors on {device}, found {key} on {tensor.device}"
            )


def check_rows(
    name: str,
    q: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
) -> Rows | None:
    """Masks and packed sequences as rows; ``None`` where every token of every row is real.

    Raises:
        OperatorInputError: both given, a mask of another shape, bounds that do not cover the tokens.
    """
    batch, num_tokens = q.shape[:2]
    if attention_mask is not None and cu_seqlens is not None:
        raise OperatorInputError(f"{name}: expected attention_mask or cu_seqlens, found both")
    if attention_mask is not None:
        require_shape(name, "attention_mask", attention_mask, (batch, num_tokens))
        return rows_of_mask(attention_mask.to(q.device))
    if cu_seqlens is None:
        return None
    bounds = [int(bound) for bound in cu_seqlens]
    if batch != 1:
        raise OperatorInputError(f"{name}: expected one row when packed, found {batch} rows")
    ascending = all(low < high for low, high in itertools.pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens or not ascending:
        raise OperatorInputError(
            f"{name}: expected cu_seqlens that ascend from 0 to {num_tokens}, found {bounds}"
        )
    return rows_of_packed(bounds, num_tokens, q.device)


def check_state(
    inner: InnerModel,
    state: FastWeightState,
    like: Tensors,
    mini_batch_size: int,
    causal: bool,
) -> FastWeightState:
    """A state handed in: of this operator, these sizes, this many rows, causal if it is open.

    Args:
        like: the weights the state should have, ``[B, H, ...]`` each.

    Raises:
        OperatorInputError: a state of another model, batch or mini-batch size.
    """
    if len(state.weights) != inner.num_weights or len(state.slots) != inner.num_slots:
        raise OperatorInputError(
            f"{inner.name}: expected a state of {inner.name}, found one of {len(state.weights)} "
            f"weights and {len(state.slots)} slots; a state fits only the model that made it"
        )
    if state.mini_batch_size != mini_batch_size:
        raise OperatorInputError(
            f"{inner.name}: expected a state with mini-batches of {mini_batch_size}, found "
            f"{state.mini_batch_size}; a state fits only the model that made it"
        )
    for found, wanted in zip(state.weights, like, strict=True):
        if found.shape != wanted.shape:
            raise OperatorInputError(
                f"{inner.name}: expected a state with weights {list(wanted.shape)}, found "
                f"{list(found.shape)}; a state fits only the model and batch that made it"
            )
        if found.dtype != wanted.dtype:
            raise OperatorInputError(
                f"{inner.name}: expected a state in {wanted.dtype}, found {found.dtype}; states are "
                "float32, float64 for float64 inputs"
            )
    if not causal and bool((state.num_open > 0).any()):
        raise OperatorInputError(
            f"{inner.name}: expected a state between mini-batches when not causal, found open ones"
        )
    return state


def require_shape(name: str, key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises :class:`OperatorInputError` unless ``tensor`` has ``shape``."""
    if tuple(tensor.shape) != shape:
        raise OperatorInputError(
            f"{name}: expected {key} {list(shape)}, found {list(tensor.shape)}"
        )
