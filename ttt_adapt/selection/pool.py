"""What a selector is given, checked once: candidates, query rows, λ, how many to pick.

Shape legend: K candidates, M query rows, D embedding width.
"""

import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import SelectionError
from ttt_adapt.types import FloatArray

if TYPE_CHECKING:
    import torch

    Matrix: TypeAlias = NDArray[Any] | torch.Tensor
else:
    Matrix: TypeAlias = Any

Float64Array: TypeAlias = NDArray[np.float64]
Precision: TypeAlias = Literal["float32", "float64"]

BLOCK_ELEMENTS = 65536
"""Elements of a block of candidates converted at a time: half a megabyte of float64."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Checked input of a selector.

    Attributes:
        candidates: ``[K, D]``; a C-contiguous floating numpy array, or a tensor on an accelerator.
        queries: float64 ``[M, D]`` on the CPU.
        num_select: picks asked for, at least 1.
        noise_var: λ, positive.
    """

    candidates: Any
    queries: Float64Array
    num_select: int
    noise_var: float

    @property
    def num_candidates(self) -> int:
        return int(self.candidates.shape[0])

    @property
    def prior_var(self) -> float:
        """Σ over query rows of ‖q‖²."""
        return float(np.vdot(self.queries, self.queries))

    @property
    def on_accelerator(self) -> bool:
        return not isinstance(self.candidates, np.ndarray)

    def rows(self, positions: Any) -> Float64Array:
        """Float64 copies ``[n, D]`` of some candidates, on the CPU."""
        if self.on_accelerator:
            import torch

            where = torch.as_tensor(np.asarray(positions), device=self.candidates.device)
            return np.asarray(self.candidates[where].double().cpu().numpy(), dtype=np.float64)
        return np.asarray(self.candidates[positions], dtype=np.float64)

    def on_cpu(self) -> FloatArray:
        """The candidates as a numpy array, copied only from an accelerator."""
        if self.on_accelerator:
            return np.ascontiguousarray(self.candidates.cpu().numpy())
        array: FloatArray = self.candidates
        return array


def read_pool(
    candidates: Matrix, queries: Matrix, *, num_select: int, noise_var: float, check: bool = True
) -> Pool:
    """Check a selector's input.

    Args:
        candidates: ``[K, D]`` numpy array or torch tensor, floating; never written to.
        queries: ``[M, D]``, likewise.
        num_select: picks asked for.
        noise_var: λ.
        check: look at every candidate value for NaN and infinity. Selectors that compute squared
            norms anyway see them there and pass ``False``.

    Raises:
        SelectionError: says what was expected, what was found and what to do.
    """
    pool_KD = _matrix(candidates, "candidates")
    queries_MD = _matrix(queries, "queries")
    if not isinstance(queries_MD, np.ndarray):
        queries_MD = queries_MD.cpu().numpy()
    if pool_KD.shape[1] != queries_MD.shape[1]:
        raise SelectionError(
            f"candidates and queries: expected one width D, found {pool_KD.shape[1]} and "
            f"{queries_MD.shape[1]}; embed both with the same model"
        )
    queries_64 = queries_MD.astype(np.float64)
    if not np.isfinite(np.vdot(queries_64, queries_64)):
        raise unusable_values(queries_64, "queries")
    pool = Pool(pool_KD, queries_64, _count(num_select), _noise(noise_var))
    if check:
        if pool.on_accelerator:
            import torch

            sound = bool(torch.isfinite(pool.candidates).all())
        else:
            sound = all(np.isfinite(rows).all() for rows in _blocks(pool.candidates))
        if not sound:
            raise unusable_values(pool.on_cpu(), "candidates")
    return pool


def unusable_values(array_ND: NDArray[Any], name: str) -> SelectionError:
    """The error for values that are not finite, or whose squares are not."""
    for start in range(0, len(array_ND), 1024):
        bad = ~np.isfinite(array_ND[start : start + 1024]).all(axis=1)
        if bad.any():
            return SelectionError(
                f"{name}: expected finite values, found NaN or infinity in row "
                f"{start + int(bad.argmax())}; embed that text again or leave it out"
            )
    return SelectionError(
        f"{name}: expected values whose squares are finite, found a largest value of "
        f"{float(np.abs(array_ND).max()):.3g}; scale candidates, queries and √noise_var down alike"
    )


def squared_norms(array_KD: FloatArray) -> FloatArray:
    """Row-wise Σ x², in the array's own precision, without a temporary of its size."""
    norms: FloatArray = np.einsum("kd,kd->k", array_KD, array_KD)
    return norms


def float64_blocks(array_KD: NDArray[Any]) -> Any:
    """Yield ``(start, rows)``: consecutive rows in float64, a bounded number at a time."""
    start = 0
    for rows in _blocks(array_KD):
        yield start, rows.astype(np.float64, copy=False)
        start += len(rows)


def _blocks(array_KD: NDArray[Any]) -> Any:
    size = max(1, BLOCK_ELEMENTS // array_KD.shape[1])
    return (array_KD[start : start + size] for start in range(0, len(array_KD), size))


def _matrix(value: Any, name: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype not in (torch.float32, torch.float64) and value.is_floating_point():
            value = value.float()
        array: Any = value.numpy() if value.device.type == "cpu" else value
        floating = value.is_floating_point()
    else:
        array = np.asarray(value)
        floating = array.dtype.kind == "f"
    if array.ndim != 2:
        raise SelectionError(
            f"{name}: expected a matrix of one vector a row, found {array.ndim} dimension(s); "
            "give a single vector as vector[None, :]"
        )
    if not floating:
        raise SelectionError(
            f"{name}: expected floating-point values, found {array.dtype}; convert to float32"
        )
    if 0 in array.shape:
        raise SelectionError(
            f"{name}: expected at least one vector of at least one value, found shape "
            f"{tuple(array.shape)}; there is nothing to choose from or to choose for"
        )
    if not isinstance(array, np.ndarray):
        return array.contiguous()
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32 if array.dtype.itemsize < 4 else np.float64)
    return np.ascontiguousarray(array)


def _count(num_select: Any) -> int:
    try:
        count = operator.index(num_select)
    except TypeError:
        count = 0
    if count < 1 or isinstance(num_select, bool):
        raise SelectionError(
            f"num_select: expected a whole number of at least 1, found {num_select!r}; "
            "ask for one pick or more"
        )
    return count


def _noise(noise_var: Any) -> float:
    try:
        value = float(noise_var)
    except (TypeError, ValueError):
        value = float("nan")
    if not 0.0 < value < float("inf"):
        raise SelectionError(
            f"noise_var: expected a positive finite number (λ), found {noise_var!r}; "
            "the usual range is 0.001 to 10 for unit vectors"
        )
    return value
