"""Recipes shipped with the package: TOML files that ``--config NAME`` finds by name.

``ablation_*``, ``pretrain_*``, ``ttt_*`` and ``transformer_*`` hold
:class:`ttt_adapt.config.PretrainSettings`, ``convert_*``
:class:`ttt_adapt.conversion_settings.ConvertSettings`, ``ttc_rl_*``
:class:`ttt_adapt.curriculum.GRPOSettings`, ``vision_*``
:class:`ttt_adapt.vision.training.VisionTrainSettings`, all others
:class:`ttt_adapt.config.ExperimentSettings`.
"""

import difflib
from pathlib import Path

from ttt_adapt.errors import SettingsError

__all__ = ["config_names", "config_path"]

_FOLDER = Path(__file__).resolve().parent


def config_names() -> list[str]:
    """The recipes' names, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def config_path(name: str) -> Path:
    """The file of the recipe called ``name``.

    Raises:
        SettingsError: there is no such recipe; the message names the nearest one, or all.
    """
    names = config_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)};"
        raise SettingsError(
            f"no recipe is called {name!r}; {hint} a file of your own must end in .toml"
        )
    return _FOLDER / f"{name}.toml"
