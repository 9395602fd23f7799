"""Settings of comparing curricula."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ttt_adapt.curriculum.comparing.arms import BASE, parse_arm
from ttt_adapt.curriculum.sampling_settings import PositiveInt, SamplingSettings, Seed
from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.settings import Settings

DEFAULT_ARMS = (BASE, "random", "nearest", "round-robin", "sift")


class ComparisonSettings(Settings):
    """What is compared, and how often. Owner: ``ttt_adapt.curriculum.comparing``.

    ``selection.method`` and the seeds of selection, training and sampling are each run's own: the
    arm's and ``seeds``.
    """

    model: str = "llama-7m"
    """A bundled model's name, a folder, or a hub id."""
    arms: tuple[str, ...] = DEFAULT_ARMS
    """``base`` (as it is), ``random`` (the corpus at large: ordinary RL at the same budget),
    ``nearest``, ``round-robin``, ``sift``; ``sift@0.1`` for a λ of its own."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Of drawing random tasks, of training, and of sampling."""
    selection: CurriculumSelectionSettings = CurriculumSelectionSettings()
    training: GRPOSettings = GRPOSettings()
    sampling: SamplingSettings = SamplingSettings()
    """Of evaluation."""
    num_samples_others: PositiveInt = 4
    """Completions of each task that shows what was forgotten."""
    ks: tuple[PositiveInt, ...] = ()
    """For pass@k and maj@k; empty: 1 and ``sampling.num_samples``."""
    keep_models: bool = True
    """Whether trained models stay; evaluated they are either way."""
    num_resamples: PositiveInt = 2000
    """Of the bootstrap over tasks and seeds."""
    level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Of intervals."""

    @property
    def rates_at(self) -> tuple[int, ...]:
        """k of pass@k and maj@k, ascending."""
        return tuple(sorted(set(self.ks or (1, self.sampling.num_samples))))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name, values in (("arms", self.arms), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: expected one or more, each once, found {values}")
        for arm in self.arms:
            parse_arm(arm)
        if max(self.rates_at) > self.sampling.num_samples:
            raise ValueError(
                f"ks: expected at most sampling.num_samples ({self.sampling.num_samples}), found "
                f"{max(self.rates_at)}"
            )
        return self
