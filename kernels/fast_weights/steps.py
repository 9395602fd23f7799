"""What a step is made of besides gradients: orthogonalisation and norms that stay.

Zhang et al. 2025 (LaCT, arXiv 2505.23884), section 3; Newton-Schulz coefficients: those of LaCT's
language models, after Jordan et al. 2024 (Muon).
"""

import torch

NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""(a, b, c) of each iteration ``X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X``."""

NORM_EPSILON = 1e-5


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Muon's update: the matrices ``[..., n, m]`` with all singular values brought near one.

    Those above 1/500 of the Frobenius norm end up between 0.85 and 1.15; zero stays zero.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.transpose(-1, -2) if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: torch.Tensor = x.transpose(-1, -2) if tall else x
    return found


def channel_norms(weight: torch.Tensor) -> torch.Tensor:
    """L2 norm of what leads to each output channel: ``[..., in, out]`` to ``[..., 1, out]``."""
    found: torch.Tensor = torch.linalg.vector_norm(weight, dim=-2, keepdim=True)
    return found


def with_norms(weight: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The weights with these :func:`channel_norms`."""
    return weight * (norms / (channel_norms(weight) + NORM_EPSILON))
