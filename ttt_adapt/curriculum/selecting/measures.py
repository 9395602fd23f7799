"""What a chosen curriculum is like: similarity, diversity, coverage, variance left.

Shape legend: K candidates, N picks, M targets, D width, n rows.
"""

from dataclasses import dataclass

import numpy as np

from ttt_adapt.selection.pool import Float64Array
from ttt_adapt.types import FloatArray, IntArray

_BLOCK_ROWS = 4096


def unit_rows_in_place(vectors_KD: FloatArray, centre_D: Float64Array | None = None) -> None:
    """Subtract ``centre_D`` from every row and scale it to length one; a zero row stays zero."""
    for start in range(0, len(vectors_KD), _BLOCK_ROWS):
        rows = vectors_KD[start : start + _BLOCK_ROWS].astype(np.float64)
        if centre_D is not None:
            rows -= centre_D
        lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))
        lengths[lengths == 0.0] = 1.0
        vectors_KD[start : start + len(rows)] = rows / lengths[:, None]


def mean_vector(vectors_KD: FloatArray) -> Float64Array:
    """Float64 ``[D]``, in bounded memory."""
    total = np.zeros(vectors_KD.shape[1])
    for start in range(0, len(vectors_KD), _BLOCK_ROWS):
        total += vectors_KD[start : start + _BLOCK_ROWS].sum(axis=0, dtype=np.float64)
    return total / len(vectors_KD)


def effective_rank(vectors_nD: FloatArray) -> float:
    """tr(C)² / tr(C²) of C = XᵀX: 1 for equal rows, at most min(n, D).

    For unit rows it is one over the mean squared cosine of two rows, themselves included.
    Source: the participation ratio of the spectrum. 0.0 where all rows are zero.
    """
    rows = vectors_nD.astype(np.float64)
    square = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    energy = float(np.trace(square))
    return energy**2 / float(np.vdot(square, square)) if energy else 0.0


def mean_cosine(vectors_nD: FloatArray) -> float:
    """Of two different unit rows; 1.0 of a single one."""
    num = len(vectors_nD)
    if num < 2:
        return 1.0
    rows = vectors_nD.astype(np.float64)
    total = rows.sum(axis=0)
    return float((total @ total - np.vdot(rows, rows)) / (num * (num - 1)))


def best_similarities(
    candidates_KD: FloatArray, targets_MD: FloatArray
) -> tuple[Float64Array, Float64Array]:
    """Largest inner products: each target's with a candidate ``[M]``, each candidate's with a
    target ``[K]``."""
    of_targets = np.full(len(targets_MD), -np.inf)
    of_candidates = np.empty(len(candidates_KD))
    targets = targets_MD.astype(candidates_KD.dtype)
    for start in range(0, len(candidates_KD), _BLOCK_ROWS):
        products = targets @ candidates_KD[start : start + _BLOCK_ROWS].T
        np.maximum(of_targets, products.max(axis=1), out=of_targets)
        of_candidates[start : start + products.shape[1]] = products.max(axis=0)
    return of_targets, of_candidates


def variance_left(
    picks_ND: Float64Array, targets_MD: Float64Array, noise_var: float
) -> Float64Array:
    """Each target's own posterior variance after all picks, ``[M]``, in float64."""
    own = np.einsum("md,md->m", targets_MD, targets_MD)
    num, width = picks_ND.shape
    if num <= width:
        gram = picks_ND @ picks_ND.T
        gram.flat[:: num + 1] += noise_var
        shared = picks_ND @ targets_MD.T
        explained = np.einsum("nm,nm->m", shared, np.linalg.solve(gram, shared))
        return np.asarray(np.clip(own - explained, 0.0, own))
    precision = picks_ND.T @ picks_ND / noise_var
    precision.flat[:: width + 1] += 1.0
    left = np.einsum("md,dm->m", targets_MD, np.linalg.solve(precision, targets_MD.T))
    return np.asarray(np.clip(left, 0.0, own))


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a curriculum holds for each target.

    Attributes:
        pick: int64 ``[M]`` place in the curriculum of the most similar pick.
        similarity: ``[M]`` cosine with it.
        num_picks: int64 ``[M]`` picks that this target is the most similar one of.
        mean_similarity: of all picks with all targets.
    """

    pick: IntArray
    similarity: Float64Array
    num_picks: IntArray
    mean_similarity: float


def coverage(picks_ND: FloatArray, targets_MD: FloatArray) -> Coverage:
    """Coverage of unit target rows by unit pick rows."""
    num_targets = len(targets_MD)
    best = np.full(num_targets, -np.inf)
    pick = np.zeros(num_targets, dtype=np.int64)
    owned = np.zeros(num_targets, dtype=np.int64)
    total = 0.0
    for start in range(0, len(picks_ND), _BLOCK_ROWS):
        products = targets_MD @ picks_ND[start : start + _BLOCK_ROWS].T
        first = products.argmax(axis=1)
        value = products[np.arange(num_targets), first]
        better = value > best
        best[better], pick[better] = value[better], start + first[better]
        owned += np.bincount(products.argmax(axis=0), minlength=num_targets)
        total += float(products.sum(dtype=np.float64))
    return Coverage(pick, best, owned, total / (num_targets * len(picks_ND)))
