"""The family by its papers' names and symbols: each a setting of :func:`fast_weights`.

Papers write the state as S with ``v = S k``; here ``v = k W``, so W is their S transposed. Shapes
are ``[B, T, H, D]``, gates ``[B, T, H]`` unless said; keys are used as they are given, so normalise
them first where the paper does. Each takes the ``initial_state``, ``output_final_state`` and
``backend`` of :func:`fast_weights`, returns what it returns and raises what it raises.
"""

from typing import TypedDict, Unpack

import torch

from ttt_adapt.kernels.fast_weights import InnerLearner, LearnerState, fast_weights
from ttt_adapt.kernels.fast_weights.learner import Order, Tensors

__all__ = [
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "lact",
    "linear_attention",
    "rwkv7",
    "titans",
    "ttt_without_norm",
]

Result = tuple[torch.Tensor, LearnerState | None]


class Options(TypedDict, total=False):
    """What every member takes besides its own arguments."""

    initial_state: LearnerState | Tensors | None
    output_final_state: bool
    backend: str


_HEBB = InnerLearner(loss="dot")


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[Options]
) -> Result:
    """``S_t = S + v kᵀ``: Katharopoulos et al. 2020 (arXiv 2006.16236), without its normaliser."""
    return fast_weights(q, k, v, lr=_ones(q), learner=_HEBB, mini_batch_size=1, **options)


def gated_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    decay: torch.Tensor,
    **options: Unpack[Options],
) -> Result:
    """``S_t = S diag(decay_t) + v kᵀ``: Yang et al. 2023 (GLA, arXiv 2312.06635) with decay
    ``[B, T, H, D]``, Dao & Gu 2024 (Mamba-2, arXiv 2405.21060) with ``[B, T, H]``."""
    lr = _ones(q)
    return fast_weights(q, k, v, lr=lr, learner=_HEBB, mini_batch_size=1, decay=decay, **options)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    beta: torch.Tensor,
    **options: Unpack[Options],
) -> Result:
    """``S_t = S (I − β k kᵀ) + β v kᵀ``: Schlag et al. 2021 (arXiv 2102.11174), Yang et al. 2024
    (DeltaNet, arXiv 2406.06484)."""
    return fast_weights(q, k, v, lr=beta, mini_batch_size=1, **options)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    **options: Unpack[Options],
) -> Result:
    """``S_t = S α (I − β k kᵀ) + β v kᵀ``: Yang et al. 2024 (Gated DeltaNet, arXiv 2412.06464).

    Its gradient is taken at the weights after their decay, so what is removed at k decays too.
    """
    return fast_weights(
        q,
        k,
        v,
        lr=beta,
        learner=_HEBB,
        mini_batch_size=1,
        decay=alpha,
        removal_key=k,
        removal_strength=alpha * beta,
        **options,
    )


def rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kappa: torch.Tensor,
    a: torch.Tensor,
    **options: Unpack[Options],
) -> Result:
    """``S_t = S (diag(w) − κᵀ (a ∘ κ)) + vᵀ k``, read by r: Peng et al. 2025 (arXiv 2503.14456).

    Args:
        r: receptance; w: decay for each channel, in (0, 1), not its logarithm.
        kappa: removal key, normalised; a: in-context learning rate ``[B, T, H, D]``.
    """
    return fast_weights(
        r,
        k,
        v,
        lr=_ones(r),
        learner=_HEBB,
        mini_batch_size=1,
        decay=w,
        removal_key=kappa,
        removal_strength=a,
        **options,
    )


def titans(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    theta: torch.Tensor,
    eta: torch.Tensor,
    alpha: torch.Tensor,
    mini_batch_size: int = 16,
    weights: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> Result:
    """``S_t = η S − θ ∇ℓ_t``, ``M_t = (1 − α) M + S_t``: Behrouz et al. 2024 (arXiv 2501.00663),
    equations 10 to 14, with a linear memory and ``ℓ = ‖M k − v‖²``, hence twice our lr."""
    return fast_weights(
        q,
        k,
        v,
        lr=2 * theta,
        mini_batch_size=mini_batch_size,
        weights=weights,
        decay=1 - alpha,
        momentum=eta,
        **options,
    )


def lact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: torch.Tensor,
    weights: Tensors | None,
    chunk_size: int = 2048,
    momentum: torch.Tensor | None = None,
    muon: bool = True,
    order: Order = "apply-then-update",
    **options: Unpack[Options],
) -> Result:
    """SwiGLU fast weights with one step a large chunk: Zhang et al. 2025 (arXiv 2505.23884).

    Args:
        lr: ``[B, T, H]`` or ``[B, T, H, 3]``; weights: ``(W1, W2, W3)`` as in :func:`fast_weights`.
        momentum: ``[B, T, H]``; a chunk takes its mean.
        order: ``apply-then-update`` for causal models, else the chunk sees its own step.
    """
    learner = InnerLearner(
        model="swiglu", loss="dot", step="mini-batch", order=order, muon=muon, normalize=True
    )
    return fast_weights(
        q,
        k,
        v,
        lr=lr,
        learner=learner,
        mini_batch_size=chunk_size,
        weights=weights,
        momentum=momentum,
        **options,
    )


def ttt_without_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: torch.Tensor,
    token_scale: torch.Tensor,
    weights: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> Result:
    """Sun et al. 2024 (TTT, arXiv 2407.04620) with ``f(x) = x W``: no bias, layer norm or residual.

    ``ttt_linear`` of the same tokens, lr and token_scale differs by exactly those three; no value
    of its layer norm's parameters makes that layer norm the identity.
    """
    return fast_weights(
        q,
        k,
        v,
        lr=lr,
        mini_batch_size=token_scale.shape[0],
        weights=weights,
        token_scale=token_scale,
        **options,
    )


def _ones(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[:3], dtype=q.dtype, device=q.device)
