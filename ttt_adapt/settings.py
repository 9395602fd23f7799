"""What all settings have in common: their base, TOML in and out, overrides, errors in one line."""

import copy
import difflib
import json
import tomllib
import typing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from ttt_adapt.errors import SettingsError

SettingsType = TypeVar("SettingsType", bound="Settings")

_DELETE = "\x7f"


class Settings(BaseModel):
    """Base of all settings: frozen, extra keys refused, only values that TOML can hold.

    Attributes:
        later: names of settings that files on users' disks may be older than; at their defaults
            they change nothing, and :meth:`identity` passes over them.
    """

    later: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    def identity(self) -> dict[str, Any]:
        """JSON values that say what is asked for, to compare and to make keys of.

        A run or an index that was begun before a setting of ``later`` existed keeps its identity.
        """
        values: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in self.later or value != field.default:
                values[name] = _identity(value)
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _writable_value(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "a field's validator"
        # pydantic takes true for 1, which in a settings file is a slip of the pen.
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("expected a number or text, not true or false")
        _require_unicode(value)
        return value


def load_settings(kind: type[SettingsType], path: Path) -> SettingsType:
    """Read a TOML file into settings.

    Raises:
        SettingsError: the file is missing, is no TOML, or holds unknown or invalid values; the
            message names every one of them.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise SettingsError(f"{path}: not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise SettingsError(_flat(f"{path}: not valid TOML: {error}")) from None
    return make_settings(kind, values, where=str(path))


def make_settings(
    kind: type[SettingsType], values: dict[str, Any], *, where: str = "settings"
) -> SettingsType:
    """Validate ``values``; one line naming every problem, as :func:`load_settings`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_flat(f"{where}: {_problems(kind, error)}")) from None


def override(settings: SettingsType, assignments: dict[str, Any]) -> SettingsType:
    """A copy with dotted keys replaced, e.g. ``{"selection.noise_var": 0.1}``.

    Assignments apply in order. A table that is absent is made: ``{"data.path": "x.jsonl"}``.
    """
    values: dict[str, Any] = settings.model_dump()
    for key, value in assignments.items():
        *parents, leaf = key.split(".")
        target = values
        for parent in parents:
            inner = target.get(parent)
            if inner is None:
                inner = target[parent] = {}
            if not isinstance(inner, dict):
                raise SettingsError(
                    f"overrides: {key}: {parent} holds a value, not a table of settings"
                )
            target = inner
        # A later key may write into the table that this one sets: the caller's must not change.
        target[leaf] = copy.deepcopy(value)
    return make_settings(type(settings), values, where="overrides")


def to_toml(settings: Settings) -> str:
    """The resolved settings as TOML; values that are ``None`` are left out (their default)."""
    return _toml_table(settings.model_dump(exclude_none=True), ())


def _identity(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, tuple):
        return [_identity(item) for item in value]
    return value


def _toml_table(values: dict[str, Any], prefix: tuple[str, ...]) -> str:
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items() if not _nested(value)]
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, dict):
            lines += ["", f"[{'.'.join(path)}]", _toml_table(value, path)]
        elif _nested(value):
            for item in value:
                lines += ["", f"[[{'.'.join(path)}]]", _toml_table(item, path)]
    return "\n".join(lines)


def _nested(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], dict)
    )


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # A JSON string is a TOML string, but for the one control character that JSON lets stand.
    return json.dumps(str(value), ensure_ascii=False).replace(_DELETE, "\\u007f")


def _require_unicode(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("expected text with a UTF-8 form, found a lone surrogate") from None
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_unicode(item)


def _problems(kind: type[Settings], error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown setting {key}{_hint(kind, item['loc'])}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"{key + ': ' if key else ''}{message} (found {item['input']!r:.80})")
    return "; ".join(parts)


def _hint(kind: type[Settings], location: tuple[int | str, ...]) -> str:
    """The key that was probably meant: one spelled alike here, or one so named in a table."""
    *parents, leaf = location
    known = _known_keys(kind, parents)
    near = difflib.get_close_matches(str(leaf), known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    if not parents:
        tables = [f"{name}.{leaf}" for name in known if leaf in _known_keys(kind, [name])]
        if tables:
            return f"; did you mean {' or '.join(tables)}?"
    return f"; known: {', '.join(known)}"


def _known_keys(kind: type[Settings], location: list[int | str]) -> list[str]:
    current: type[Settings] | None = kind
    for part in location:
        if isinstance(part, str) and current is not None:
            current = _table(current.model_fields[part].annotation)
    return list(current.model_fields) if current is not None else []


def _table(annotation: Any) -> type[Settings] | None:
    """The settings that ``X``, ``X | None`` or ``tuple[X, ...]`` holds."""
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Settings):
            return option
    return None


def _flat(message: str) -> str:
    return " ".join(message.split())
