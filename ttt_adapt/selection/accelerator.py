"""The fast pass of SIFT on tensors, for candidates that live on an accelerator.

Shape legend as in ``screening.py``.
"""

from typing import Any

import torch

from ttt_adapt.selection.pool import Float64Array
from ttt_adapt.types import FloatArray

_MAX_TEMPORARY = 2**24


class TensorScreen:
    """:class:`~ttt_adapt.selection.screening.RowsScreen` on tensors of any device.

    Products are matrix times vector throughout: tensor cores, whose reduced-precision modes a
    program may have switched on, are for matrix times matrix.
    """

    def __init__(
        self,
        candidates_KD: torch.Tensor,
        queries_MD: Float64Array,
        noise_var: float,
        num_select: int,
    ) -> None:
        num, width = candidates_KD.shape
        queries = torch.as_tensor(queries_MD).to(candidates_KD)
        self._candidates = candidates_KD
        self._norms2 = torch.empty_like(candidates_KD[:, 0])
        size = max(1, _MAX_TEMPORARY // width)
        for start in range(0, num, size):
            rows = candidates_KD[start : start + size]
            torch.sum(rows * rows, dim=1, out=self._norms2[start : start + size])
        self.max_norm2 = float(self._norms2.max())
        self._noise_var = noise_var
        self._noisy = self._norms2 + noise_var
        self._covariance = torch.stack([torch.mv(candidates_KD, row) for row in queries])
        self._basis = candidates_KD.new_empty((num_select, width))
        self._num_picked = 0
        self._banned: list[int] = []
        self._scores = self._noisy

    def leader(self) -> tuple[int, float, float, float]:
        squares = torch.zeros_like(self._noisy)
        size = max(1, _MAX_TEMPORARY // len(squares))
        for start in range(0, len(self._covariance), size):
            rows = self._covariance[start : start + size]
            squares += (rows * rows).sum(dim=0)
        scores = self._scores = squares / self._noisy
        if self._banned:
            scores[self._banned] = -1.0
        if len(scores) == 1:
            return 0, float(scores[0]), self.ratio(0), -1.0
        values, positions = torch.topk(scores, 2)
        best, second = values.tolist()
        # Among equals topk takes any; the caller asks again when the runner-up comes this close.
        first = int(positions[0])
        return first, best, self.ratio(first), second

    def ratio(self, position: int) -> float:
        return float(self._norms2[position] / self._noisy[position])

    def above(self, threshold: float) -> tuple[Any, FloatArray, FloatArray, FloatArray]:
        positions = torch.nonzero(self._scores >= threshold)[:, 0]
        values = (self._scores, self._noisy, self._norms2)
        scores, noisy, norms2 = (value[positions].cpu().numpy() for value in values)
        return positions.cpu().numpy(), scores, noisy, norms2

    def pick(self, position: int) -> None:
        step = self._num_picked
        candidate = self._candidates[position]
        basis = self._basis[:step]
        scale = self._noisy[position].rsqrt()
        direction = self._basis[step]
        if step:
            torch.sub(candidate, torch.mv(basis.T, torch.mv(basis, candidate)), out=direction)
        else:
            direction.copy_(candidate)
        direction *= scale
        work = torch.mv(self._candidates, direction)
        shares = self._covariance[:, position] * scale
        self._covariance.addr_(shares, work, alpha=-1.0)
        self._noisy.addcmul_(work, work, value=-1.0).clamp_(min=self._noise_var)
        self._num_picked += 1

    def ban(self, position: int) -> None:
        self._banned.append(position)
