"""Which λ a curriculum of N tasks asks for; the study behind it is in LOG.

Shape legend: K candidates, M targets, D width, n picks looked at.
"""

from dataclasses import dataclass

import numpy as np

from ttt_adapt.curriculum.selecting.turns import round_robin
from ttt_adapt.errors import SelectionError
from ttt_adapt.selection.pool import Float64Array, Matrix, Pool, read_pool

SIGNAL_LEFT = 0.15
"""ρ: how much of the targets' pull is left when all picks are made. A compromise (LOG): 0.33 keeps all
picks in the targets' families and starves the rare ones; by what a model learned from three families
0.05 was best, but it spends two picks of three elsewhere where the family is one of few."""
_MAX_ROWS = 2048


@dataclass(frozen=True, slots=True)
class NoiseSuggestion:
    """A λ and where it comes from.

    Attributes:
        noise_var: λ.
        reason: one line for people.
    """

    noise_var: float
    reason: str


def suggested_noise_var(
    candidates: Matrix, targets: Matrix, *, num_select: int, signal_left: float = SIGNAL_LEFT
) -> NoiseSuggestion:
    """The λ at which N good picks neither exhaust the targets nor leave them untouched.

    SIFT picks what lowers the targets' variance most. While a task x is as telling as at the start,
    its pull is ‖Qx‖²; after picks P it is ‖QΣx‖², Σ = (I + PᵀP/λ)⁻¹. With a λ that is small for N
    the pull of the targets' own kind falls to nothing, and the picks that remain go wherever some
    variance is left: to other families, for diversity's sake. With a λ that is large it hardly
    falls, and a majority among the targets takes every pick from a minority. So λ is chosen such
    that a share ρ of the pull is left after N picks that serve every target (each takes its nearest
    task in turn):

        Σ_i e_i m_i (λ / (λ + e_i))² = ρ² Σ_i e_i m_i,    m_i = ‖Q u_i‖²

    with e_i and u_i the eigenvalues and eigenvectors of PᵀP: the root mean square over these picks
    of ‖QΣx‖, relative to the start. The left side rises with λ, so bisection finds it.

    For picks that share a direction of squared cosine s it is λ = N·s·ρ/(1 − ρ), about N·s/6; 1/s is the
    effective rank of the targets' neighbourhood. Hence it grows with N, and it is larger for vectors
    in which a family is tight. N over the effective rank of the whole *corpus*, which needs
    no targets, was tried too: it is as good where the targets' family is a tenth of the corpus, and
    too small where it is rare.

    Args:
        candidates: ``[K, D]``.
        targets: ``[M, D]``.
        num_select: N.
        signal_left: ρ, between 0 and 1.

    Returns:
        λ to two digits, and how it was derived. λ scales with the vectors' squared length.

    Raises:
        SelectionError: input that no selector accepts, or ρ outside 0 to 1.
    """
    if not 0.0 < signal_left < 1.0:
        raise SelectionError(
            f"signal_left: expected a number between 0 and 1, found {signal_left!r}; the default "
            f"is {SIGNAL_LEFT:.2g}"
        )
    pool = read_pool(candidates, targets, num_select=num_select, noise_var=1.0)
    picks = round_robin(pool)
    return noise_for(pool, picks, signal_left=signal_left)


def noise_for(pool: Pool, picks: list[int], *, signal_left: float = SIGNAL_LEFT) -> NoiseSuggestion:
    """The λ at which ``picks`` leave ``signal_left`` of the pull; see :func:`suggested_noise_var`."""
    energies, weights = _spectrum(pool, picks)
    total = float(weights.sum())
    if total <= 0.0:
        return NoiseSuggestion(1.0, "no task has anything in common with a target")

    def left(noise_var: float) -> float:
        shrink = noise_var / (noise_var + energies)
        return float(np.sqrt((weights * shrink**2).sum() / total))

    low, high = (bound * float(energies.max()) for bound in (1e-9, 1e9))
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if left(middle) < signal_left else (low, middle)
    noise_var = float(f"{(low * high) ** 0.5:.2g}")
    return NoiseSuggestion(
        noise_var,
        f"with λ = {noise_var:g} the {len(picks):,} nearest tasks, taken in turn for each target, "
        f"leave {signal_left:.0%} of the targets' pull",
    )


def _spectrum(pool: Pool, picks: list[int]) -> tuple[Float64Array, Float64Array]:
    """Eigenvalues e of PᵀP, and e·‖Qu‖² for its eigenvectors u."""
    rows = np.asarray(picks)
    scale = 1.0
    if len(rows) > _MAX_ROWS:
        rows = rows[np.linspace(0, len(rows) - 1, _MAX_ROWS).astype(np.int64)]
        scale = len(picks) / len(rows)
    picks_nD = pool.rows(rows)
    if len(rows) <= picks_nD.shape[1]:
        values, left = np.linalg.eigh(picks_nD @ picks_nD.T)
        # ‖Qu‖²·e = ‖Q Pᵀ l‖² for the eigenvector l of P Pᵀ that belongs to u.
        weights = np.sum((pool.queries @ picks_nD.T @ left) ** 2, axis=0)
    else:
        values, vectors = np.linalg.eigh(picks_nD.T @ picks_nD)
        weights = values * np.sum((pool.queries @ vectors) ** 2, axis=0)
    kept = values > 1e-12 * max(float(values.max()), 1e-300)
    return values[kept] * scale, weights[kept]
