"""Choosing again while training: only tasks that are neither solved nor hopeless.

Shape legend: K candidates, n tasks practised before, D width.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ttt_adapt.curriculum.selecting.choosing import choose_embedded, eligible_positions
from ttt_adapt.curriculum.selecting.curricula import Curriculum
from ttt_adapt.curriculum.selecting.embedders import TaskEmbedder, load_task_embedder
from ttt_adapt.curriculum.selecting.embedding import (
    EmbeddedTasks,
    StageProgress,
    embed_for_selection,
)
from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import TaskError
from ttt_adapt.selection.pool import Float64Array
from ttt_adapt.types import FloatArray, IntArray

Band = tuple[float, float]
_RIDGE = 1.0


class Reselection:
    """The ``reselect`` of training: calls choose tasks anew among those of a fitting pass rate.

    Embeds once. A task's pass rate is the one measured, else what its neighbours in the embedding
    lead to expect (:func:`expected_pass_rates`). Tasks outside the band are left out; where fewer
    than N are inside, those nearest to it fill up. Then the method of the settings chooses.

    Source: the achievability band of Hübotter et al. 2025 (TTC-RL), which has 0.25 to 0.6.
    """

    def __init__(
        self,
        corpus: Sequence[Task],
        targets: Sequence[Task],
        settings: CurriculumSelectionSettings | None = None,
        *,
        embedder: TaskEmbedder | None = None,
        cache: str | Path | None = None,
        progress: StageProgress | None = None,
    ) -> None:
        """Arguments and errors as :func:`~ttt_adapt.curriculum.selecting.select_curriculum`."""
        self.settings = settings or CurriculumSelectionSettings()
        self._corpus = list(corpus)
        self._targets = list(targets)
        self._eligible = eligible_positions(self._corpus, self._targets)
        self._embedded = embed_for_selection(
            [self._corpus[position] for position in self._eligible.tolist()],
            self._targets,
            embedder if embedder is not None else load_task_embedder(self.settings),
            cache=None if cache is None else Path(cache),
            progress=progress,
        )

    def __call__(
        self, pass_rates: Mapping[str, float], *, step: int = 0, band: Band = (0.25, 0.6)
    ) -> Sequence[Task]:
        """Tasks to go on with; the hook of ``train_curriculum``.

        Args:
            pass_rates: of tasks practised so far, by id, 0 to 1; ids of other corpora are ignored.
            step: of training; choices depend on the pass rates alone.
            band: lowest and highest pass rate, both included.
        """
        return self.choose(pass_rates, band=band).tasks

    def choose(
        self,
        pass_rates: Mapping[str, float],
        *,
        band: Band = (0.25, 0.6),
        progress: StageProgress | None = None,
    ) -> Curriculum:
        """The same with its report.

        Raises:
            TaskError: a band or a pass rate outside 0 to 1.
        """
        low, high = band
        if not 0.0 <= low <= high <= 1.0:
            raise TaskError(f"band: expected 0 ≤ low ≤ high ≤ 1, found {band}")
        rates = self._expected(pass_rates)
        distance = np.nan_to_num(np.maximum(np.maximum(low - rates, rates - high), 0.0))
        num_inside = int((distance == 0.0).sum())
        num_kept = min(len(rates), max(num_inside, self.settings.num_select))
        kept = np.sort(np.argsort(distance, kind="stable")[:num_kept])
        inside = EmbeddedTasks(
            self._embedded.candidates[kept],
            self._embedded.targets,
            self._embedded.description,
            self._embedded.fingerprint,
        )
        return choose_embedded(
            self._corpus,
            self._targets,
            self._eligible[kept],
            inside,
            self.settings,
            num_evaluation_only=len(self._corpus) - len(self._eligible),
            progress=progress,
        )

    def _expected(self, pass_rates: Mapping[str, float]) -> Float64Array:
        """A pass rate for every candidate, ``[K]``."""
        rates = np.array(
            [
                pass_rates.get(self._corpus[position].id, np.nan)
                for position in self._eligible.tolist()
            ],
            dtype=np.float64,
        )
        known = np.flatnonzero(~np.isnan(rates))
        found = rates[known]
        if len(known) and not (found.min() >= 0.0 and found.max() <= 1.0):
            raise TaskError(
                f"pass rates: expected 0 to 1, found {found.min():g} to {found.max():g}"
            )
        expected = expected_pass_rates(self._embedded.candidates, known, found)
        expected[known] = found
        return expected


def expected_pass_rates(
    candidates_KD: FloatArray, known_n: IntArray, rates_n: Float64Array
) -> Float64Array:
    """What pass rates measured on some tasks say about all, ``[K]``, within 0 to 1.

    The posterior mean of the model that SIFT selects by, f(x) = m + θᵀx with θ ~ N(0, I) and noise
    of variance 1 in units of the rates' own variance: ridge regression around the mean rate m.
    NaN for all where nothing is measured.
    """
    if not len(known_n):
        return np.full(len(candidates_KD), np.nan)
    rows = candidates_KD[known_n].astype(np.float64)
    mean = float(rates_n.mean())
    num, width = rows.shape
    if num <= width:
        gram = rows @ rows.T
        gram.flat[:: num + 1] += _RIDGE
        weights = rows.T @ np.linalg.solve(gram, rates_n - mean)
    else:
        gram = rows.T @ rows
        gram.flat[:: width + 1] += _RIDGE
        weights = np.linalg.solve(gram, rows.T @ (rates_n - mean))
    expected = candidates_KD @ weights.astype(candidates_KD.dtype)
    return np.asarray(np.clip(mean + expected.astype(np.float64), 0.0, 1.0))
