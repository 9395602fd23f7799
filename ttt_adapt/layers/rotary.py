"""Rotary positions of interleaved pairs (Su et al. 2021, arXiv 2104.09864), computed in float32.

Nothing is stored: a table that a model kept in a buffer could be lost between saving and loading.

Shape legend: B rows, T tokens, H heads, D head width.
"""

import torch


def rotary_angles(position_BT: torch.Tensor, width: int, theta: float) -> torch.Tensor:
    """Angles ``position · theta^(−2i/D)``, float32 ``[B, T, D / 2]``.

    Args:
        position_BT: integers ``[B, T]``, or ``[1, T]`` where all rows agree.
        width: D, even.
        theta: base of the wave lengths.
    """
    pair = torch.arange(0, width, 2, device=position_BT.device, dtype=torch.float32)
    return position_BT[..., None].float() * theta ** (-pair / width)


def rotate_pairs(x_BTHD: torch.Tensor, angles_BTd: torch.Tensor) -> torch.Tensor:
    """Turn dimensions ``(2i, 2i + 1)`` of every head by angle i, in x's dtype.

    Args:
        x_BTHD: ``[B, T, H, D]``, any float dtype; rotated in float32 (float64 stays).
        angles_BTd: of :func:`rotary_angles`.
    """
    precise = x_BTHD.to(torch.promote_types(x_BTHD.dtype, torch.float32))
    turn = torch.polar(torch.ones_like(angles_BTd), angles_BTd)[:, :, None]
    pairs = torch.view_as_complex(precise.reshape(*x_BTHD.shape[:-1], x_BTHD.shape[-1] // 2, 2))
    turned = torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2)
    return turned.to(x_BTHD.dtype)
