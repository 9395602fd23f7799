"""Frozen values as JSON and back, exactly.

The form follows the dataclass: an object with one key a field, tuples as arrays. A float that JSON
has no number for is a string where the type says ``float``: ``"NaN"``, ``"Infinity"``,
``"-Infinity"``; every finite float keeps all its digits. So each line of ``results.jsonl`` is
strict JSON that other tools read.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ttt_adapt.errors import UserError
from ttt_adapt.storage import atomic_write
from ttt_adapt.types import Prediction

Value = TypeVar("Value")


def to_json(value: Any) -> Any:
    """The JSON form of a frozen value, or of anything such values are made of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "item"):  # numpy's numbers
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"expected a value with a JSON form, found {type(value).__name__}")


def from_json(kind: type[Value], value: Any, *, where: str = "value") -> Value:
    """The inverse of :func:`to_json` for a dataclass ``kind``.

    Raises:
        UserError: a field is missing, unknown or of another type; the message names it.
    """
    result: Value = _decode(kind, value, where)
    return result


def dumps(value: Any) -> str:
    """One line of ASCII: survives any text, also one that UTF-8 cannot hold."""
    return json.dumps(to_json(value), allow_nan=False, separators=(",", ":"))


def loads(kind: type[Value], line: str, *, where: str = "value") -> Value:
    """The inverse of :func:`dumps`; raises :class:`UserError` as :func:`from_json` does."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    return from_json(kind, value, where=where)


def write_results(path: Path, predictions: Iterable[Prediction]) -> int:
    """Write one prediction a line, atomically; return how many."""
    count = 0
    with atomic_write(path, "w") as stream:
        for prediction in predictions:
            stream.write(dumps(prediction) + "\n")
            count += 1
    return count


def read_results(path: Path) -> list[Prediction]:
    """Read what :func:`write_results` wrote.

    Raises:
        UserError: the file is missing, or a line holds no prediction; the message names the line.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            return [
                loads(Prediction, line, where=f"{path}:{number}")
                for number, line in enumerate(stream, start=1)
                if line.strip()
            ]
    except FileNotFoundError:
        raise UserError(f"{path}: no such results file; run the evaluation first") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8, so not a results file") from None


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _decode(inner, value, where)
    if origin is tuple:
        _require(isinstance(value, list), "an array", value, where)
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _require(isinstance(value, dict), "an object", value, where)
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if kind is float:
        special = isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(special or number, "a number", value, where)
        return float(value)
    if kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
        _require(fits, "an integer", value, where)
    elif kind in (str, bool):
        _require(isinstance(value, kind), "text" if kind is str else "true or false", value, where)
    else:
        raise TypeError(f"{where}: no JSON form is defined for {kind}")
    return value


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), f"an object ({kind.__name__})", value, where)
    fields = _fields(kind)
    missing: Sequence[str] = [name for name in fields if name not in value]
    unknown = [name for name in value if name not in fields]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise UserError(f"{where}: a {kind.__name__} {problem}; was it written by another version?")
    return kind(
        **{name: _decode(inner, value[name], f"{where}.{name}") for name, inner in fields.items()}
    )


def _require(condition: bool, expected: str, value: Any, where: str) -> None:
    if not condition:
        raise UserError(f"{where}: expected {expected}, found {value!r:.60}")
