"""Arms of an evaluation: a name for what is selected and how it is used.

base                    no adaptation
in-context              the nearest passages as a prefix (retrieval-augmented baseline)
in-context-SELECTOR     another selector's passages as a prefix
SELECTOR                that selector's passages, adapted to as the settings say
SELECTOR@X              the same with noise_var (λ) = X
"""

from dataclasses import dataclass
from typing import get_args

from ttt_adapt.config import AdaptationSettings, ExperimentSettings, SelectionSettings, override
from ttt_adapt.errors import SettingsError

SELECTORS: tuple[str, ...] = get_args(SelectionSettings.model_fields["method"].annotation)


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of a comparison."""

    name: str
    selection: SelectionSettings
    adaptation: AdaptationSettings


def make_arm(name: str, settings: ExperimentSettings) -> Arm:
    """The arm of that name under an experiment's settings.

    Raises:
        SettingsError: no arm is called that; the message lists those there are.
    """
    selection, adaptation = settings.selection, settings.adaptation
    selector, _, noise_var = name.partition("@")
    if selector == "base":
        selector = "nearest"
        adaptation = override(adaptation, {"method": "none"})
    elif selector.startswith("in-context"):
        selector = selector.removeprefix("in-context").removeprefix("-") or "nearest"
        adaptation = override(adaptation, {"method": "in-context"})
    if selector not in SELECTORS:
        raise SettingsError(
            f"expected an arm named base, in-context or a selector ({', '.join(SELECTORS)}), "
            f"optionally with @noise_var; found {name!r}"
        )
    changes: dict[str, object] = {"method": selector}
    if noise_var:
        try:
            changes["noise_var"] = float(noise_var)
        except ValueError:
            raise SettingsError(f"{name}: expected a number after @, found {noise_var!r}") from None
    return Arm(name, override(selection, changes), adaptation)
