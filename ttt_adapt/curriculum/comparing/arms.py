"""Arms of a comparison: the model as it is, and curricula chosen in different ways."""

from dataclasses import dataclass

from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.errors import SettingsError

BASE = "base"
METHODS = ("random", "nearest", "round-robin", "sift")
SEEDED = ("random",)
"""Methods whose choice depends on the seed; others choose once for all seeds."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to come to a model.

    Attributes:
        name: as it was asked for; also its folder's.
        method: ``None``: the base model, which practises nothing.
        noise_var: λ of its own; ``None``: the settings'.
    """

    name: str
    method: str | None
    noise_var: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One arm under one seed."""

    arm: Arm
    seed: int

    @property
    def folder(self) -> str:
        """Of its results, below the comparison's."""
        return f"runs/{self.arm.name}/seed-{self.seed}"

    @property
    def curriculum(self) -> str | None:
        """Folder of the tasks it practises, below the comparison's; ``None``: it does not."""
        if self.arm.method is None:
            return None
        seed = f"/seed-{self.seed}" if self.arm.method in SEEDED else ""
        return f"curricula/{self.arm.name}{seed}"


def parse_arm(name: str) -> Arm:
    """The arm that ``base``, ``nearest`` or ``sift@0.1`` stands for.

    Raises:
        SettingsError: a method that nothing here has, or a λ that is no positive number.
    """
    if name == BASE:
        return Arm(BASE, None)
    method, at, number = name.partition("@")
    if method not in METHODS:
        raise SettingsError(
            f"arm {name!r}: expected {BASE}, {', '.join(METHODS)}, or sift@λ; found {method!r}"
        )
    if not at:
        return Arm(name, method)
    if method != "sift":
        raise SettingsError(f"arm {name!r}: expected λ after sift only; write {method!r}")
    try:
        noise_var = float(number)
    except ValueError:
        noise_var = 0.0
    if not 0.0 < noise_var < float("inf"):
        raise SettingsError(f"arm {name!r}: expected a positive number after @, found {number!r}")
    return Arm(name, method, noise_var)


def arm_selection(
    arm: Arm, settings: CurriculumSelectionSettings, seed: int
) -> CurriculumSelectionSettings:
    """The selection settings of an arm under a seed."""
    changes: dict[str, object] = {"method": arm.method}
    if arm.noise_var is not None:
        changes["noise_var"] = arm.noise_var
    if arm.method in SEEDED:
        changes["seed"] = seed
    return settings.model_copy(update=changes)
