"""A row of any format, by its columns: text, identity, subset and the rest."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.corpus.streams import too_long

_MISSING = object()
DEFAULT_IDS = ("meta.id", "id")
DEFAULT_SUBSETS = ("meta.pile_set_name", "subset")


@dataclass(frozen=True, slots=True)
class Record:
    """A document before it has an id.

    Attributes:
        location: where it was found, for people and for error messages.
        position_id: an id made of the file's label and a position in it: unique in its corpus.
        own_id: the id that the row itself holds, or ``None``.
    """

    location: str
    position_id: str
    text: str
    own_id: str | None = None
    subset: str = ""
    meta: Mapping[str, Any] | None = None


def record_of(values: Mapping[str, Any], settings: CorpusSettings, location: str) -> Record:
    """Pick a row's columns; ``location`` doubles as its positional id.

    Raises:
        Malformed: a column asked for is missing or of the wrong type, or the text is too long.
    """
    text = _lookup(values, settings.text_column)
    if text is _MISSING:
        raise Malformed(missing_column(settings.text_column, values))
    if not isinstance(text, str):
        raise Malformed(f"column {settings.text_column!r}: expected a string, found {_kind(text)}")
    limit = settings.max_document_bytes
    if 4 * len(text) > limit and len(text.encode("utf-8", "surrogatepass")) > limit:
        raise Malformed(too_long(limit))
    meta = {key: value for key, value in values.items() if key != settings.text_column}
    return Record(
        location=location,
        position_id=location,
        text=text,
        own_id=_own_id(values, settings),
        subset=_subset(values, settings),
        meta=meta,
    )


def needed_columns(names: Iterable[str], settings: CorpusSettings) -> list[str]:
    """The top-level columns of a table that documents are made of, in the table's order.

    Raises:
        Malformed: one asked for by name is not there; the message names those that are.
    """
    present = list(names)
    wanted = set()
    for asked in (settings.text_column, settings.id_column, settings.subset_column):
        if asked is None:
            continue
        top = asked if asked in present else asked.partition(".")[0]
        if top not in present:
            raise Malformed(missing_column(asked, present))
        wanted.add(top)
    if settings.id_column is None:
        wanted |= {"meta", "id"}
    if settings.subset_column is None:
        wanted |= {"meta", "subset"}
    return [name for name in present if name in wanted]


def missing_column(column: str, names: Iterable[str]) -> str:
    """The reason for refusing what lacks a column, naming those it has."""
    return f"no column {column!r}; found: {', '.join(map(str, names)) or 'none'}"


def json_value(value: Any) -> Any:
    """A table's value as JSON has it: NaN becomes null, what JSON does not know its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return str(value)


def _lookup(values: Mapping[str, Any], column: str) -> Any:
    if column in values:
        return values[column]
    current: Any = values
    for part in column.split("."):
        if not isinstance(current, Mapping) or part not in current:
            return _MISSING
        current = current[part]
    return current


def _own_id(values: Mapping[str, Any], settings: CorpusSettings) -> str | None:
    if settings.id_column is None:
        return next(filter(None, (_name(_lookup(values, c)) for c in DEFAULT_IDS)), None)
    value = _lookup(values, settings.id_column)
    if value is _MISSING:
        raise Malformed(missing_column(settings.id_column, values))
    identifier = _name(value)
    if not identifier:
        raise Malformed(
            f"column {settings.id_column!r}: expected an id (a string or an integer), "
            f"found {_kind(value)}"
        )
    return identifier


def _subset(values: Mapping[str, Any], settings: CorpusSettings) -> str:
    if settings.subset_column is None:
        return next(filter(None, (_name(_lookup(values, c)) for c in DEFAULT_SUBSETS)), "")
    value = _lookup(values, settings.subset_column)
    if value is _MISSING:
        raise Malformed(missing_column(settings.subset_column, values))
    name = _name(value)
    if name is None and value is not None:
        raise Malformed(
            f"column {settings.subset_column!r}: expected a name (a string or an integer), "
            f"found {_kind(value)}"
        )
    return name or ""


def _name(value: Any) -> str | None:
    """Text of a string with a UTF-8 form or of an integer; ``None`` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and (value.isascii() or not _has_surrogate(value)):
        return value
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "an empty string" if not value else "a string without a UTF-8 form"
    names = {bool: "a boolean", int: "an integer", float: "a number", list: "a list"}
    names[dict] = "an object"
    return names.get(type(value), type(value).__name__)
