"""A comparison as files: ``comparison.json`` for programs, ``comparison.md`` for people."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttt_adapt.curriculum.comparing.comparison import (
    ArmSummary,
    Choice,
    Comparison,
    Difference,
)
from ttt_adapt.curriculum.comparing.results import CurvePoint, RunCost
from ttt_adapt.curriculum.comparing.wording import comparison_as_markdown
from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.solving import Estimate, SolveRates
from ttt_adapt.storage import atomic_write, write_json

JSON_NAME, TEXT_NAME = "comparison.json", "comparison.md"
FORMAT_VERSION = 1


def write_comparison(out: Path, comparison: Comparison) -> list[Path]:
    """Write both files into ``out``; return their paths."""
    write_json(out / JSON_NAME, comparison_to_json(comparison))
    with atomic_write(out / TEXT_NAME, "w") as stream:
        stream.write(comparison_as_markdown(comparison))
    return [out / JSON_NAME, out / TEXT_NAME]


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """JSON values; NaN becomes ``None``."""
    values: dict[str, Any] = finite_json({"format_version": FORMAT_VERSION, **asdict(comparison)})
    return values


def is_comparison(folder: Path) -> bool:
    """Whether :func:`write_comparison` wrote there."""
    return (folder / JSON_NAME).is_file()


def read_comparison(folder: Path) -> Comparison:
    """What :func:`write_comparison` wrote.

    Raises:
        UserError: nothing, something damaged, or another format.
    """
    path = folder / JSON_NAME
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a folder that `curriculum compare` made")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format_version") != FORMAT_VERSION:
            raise ValueError("another format")
        return Comparison(
            **{
                **values,
                "arms": tuple(_arm(arm) for arm in values["arms"]),
                "differences": tuple(_difference(item) for item in values["differences"]),
                "seeds": tuple(values["seeds"]),
                "rates_at": tuple(values["rates_at"]),
                "notes": tuple(values["notes"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: expected a comparison, found something else ({type(error).__name__}: "
            f"{error!s:.80}); the same `curriculum compare` writes it again"
        ) from None


def finite_json(value: Any) -> Any:
    """Containers as JSON ones; numbers that JSON has no form for become ``None``."""
    if isinstance(value, dict):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _estimate(values: dict[str, Any]) -> Estimate:
    ends = {
        key: math.nan if values[key] is None else values[key] for key in ("value", "low", "high")
    }
    return Estimate(**ends, num_tasks=values["num_tasks"])


def _estimates(values: dict[str, dict[str, Any]]) -> dict[str, Estimate]:
    return {name: _estimate(item) for name, item in values.items()}


def _optional(values: dict[str, Any] | None) -> Estimate | None:
    return None if values is None else _estimate(values)


def _by_k(values: dict[str, dict[str, Any]]) -> dict[int, Estimate]:
    return {int(k): _estimate(item) for k, item in values.items()}


def _curve(values: Sequence[dict[str, Any]]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(**point) for point in values)


def _arm(values: dict[str, Any]) -> ArmSummary:
    rates, choice = values["rates"], values["choice"]
    return ArmSummary(
        **{
            **values,
            "rates": SolveRates(
                **{
                    **rates,
                    "pass_at": _by_k(rates["pass_at"]),
                    "average": _estimate(rates["average"]),
                    "majority_at": _by_k(rates["majority_at"]),
                }
            ),
            "by_target": _estimate(values["by_target"]),
            "by_subset": _estimate(values["by_subset"]),
            "subsets": _estimates(values["subsets"]),
            "others": _optional(values["others"]),
            "other_subsets": _estimates(values["other_subsets"]),
            "cost": RunCost(**values["cost"]),
            "curve": _curve(values["curve"]),
            "curves": tuple(_curve(curve) for curve in values["curves"]),
            "choice": None
            if choice is None
            else Choice(
                **{
                    **choice,
                    "warnings": tuple(choice["warnings"]),
                    "first": tuple(choice["first"]),
                }
            ),
        }
    )


def _difference(values: dict[str, Any]) -> Difference:
    return Difference(
        arm=values["arm"],
        against=values["against"],
        by_target=_estimate(values["by_target"]),
        by_subset=_estimate(values["by_subset"]),
        others=_optional(values["others"]),
    )
