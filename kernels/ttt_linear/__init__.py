"""TTT-Linear: a linear model as hidden state, learning from each token it reads.

    from ttt_adapt.kernels.ttt_linear import ttt_linear

    out, state = ttt_linear(q, k, v, lr, token_scale=scale, weight=w, bias=b, ln_weight=g, ln_bias=c)

One operator, three backends (``reference``, ``chunked``, ``triton``) that agree; see README.md.

Shape legend: B rows, T tokens, H heads, D head width, b tokens in a mini-batch, N packed sequences.
"""

from collections.abc import Sequence

import torch

from ttt_adapt.kernels.inner_loop.call import call_operator
from ttt_adapt.kernels.inner_loop.models import LinearModel, Shared, Tensors, Tokens
from ttt_adapt.kernels.inner_loop.state import FastWeightState

__all__ = ["ttt_linear"]

_INNER = LinearModel()


def ttt_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lr: torch.Tensor,
    *,
    token_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    ln_weight: torch.Tensor,
    ln_bias: torch.Tensor,
    mini_batch_size: int = 16,
    initial_state: FastWeightState | Tensors | None = None,
    output_final_state: bool = False,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    causal: bool = True,
    check_finite: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, FastWeightState | None]:
    """Sequence layer whose hidden state is ``f(x) = x W + b``, trained on the tokens it reads.

    Within a mini-batch that starts with parameters P, token j's loss is
    ``ℓ_j = ½‖LN(f(k_j; P)) − (v_j − k_j)‖²``, and token i is answered by
    ``q_i + LN(f(q_i; P_i))`` with ``P_i = P − s_i Σ_(j≤i) lr_j ∂ℓ_j/∂P`` (s: ``token_scale``); the
    last token's parameters start the next mini-batch. Sun et al. 2024, arXiv 2407.04620, equations
    5 to 7 and section 2.6; the public reference's semantics, exactly.

    Args:
        q: ``[B, T, H, D]``, float16, bfloat16, float32 or float64; k, v alike.
        lr: ``[B, T, H]``, each key's learning rate, the base rate, gate and 1/D applied.
        token_scale: ``[mini_batch_size]``, by position in the mini-batch, already clamped.
        weight: ``[H, D, D]``, W where a sequence begins; bias: ``[H, D]``.
        ln_weight: ``[H, D]``; ln_bias: ``[H, D]``: the inner layer norm (eps 1e-6).
        mini_batch_size: b; a last mini-batch may be shorter.
        initial_state: where to go on: a state of an earlier call (of ``B`` rows, or ``N`` when
            packed), at any offset; or weights ``(weight [B, H, D, D], bias [B, H, D])`` alone. ``None``: the parameters above.
        output_final_state: whether to return the state after the last token.
        attention_mask: ``[B, T]``, zero for padding wherever it stands: the result for the other
            tokens is as if it were not there; its own output is zero.
        cu_seqlens: bounds ``[N + 1]`` of sequences packed into one row (B = 1).
        causal: ``False``: every token is answered by the mini-batch's last parameters.
        check_finite: whether NaN and infinity are refused, on a CPU (on an accelerator, looking
            would mean waiting). ``False``: they spread from where they stand, within their row.
        backend: ``auto`` (Triton on a GPU where it can, else ``chunked``), ``reference``,
            ``chunked`` or ``triton``.

    Returns:
        ``[B, T, H, D]`` in q's dtype, and the final state (float32 inside; gradients flow through
        both states), or ``None``.

    Raises:
        OperatorInputError: shapes, dtypes, devices or values that do not fit, or another
            operator's state.
    """
    _, _, heads, width = q.shape if q.ndim == 4 else (0,) * 4
    parameters = {"weight": (weight, (heads, width, width)), "bias": (bias, (heads, width))}
    return call_operator(
        _INNER,
        Tokens(q, k, v, lr),
        Shared(token_scale, ln_weight, ln_bias),
        parameters,
        mini_batch_size=mini_batch_size,
        initial_state=initial_state,
        output_final_state=output_final_state,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        causal=causal,
        check_finite=check_finite,
        backend=backend,
    )
