"""Python values as JSON and back, between a program under test and whoever checks it.

Only plain values cross, by their exact content: an object with an ``__eq__`` of its own arrives as an
:class:`Opaque` that equals nothing but itself, a subclass of ``int`` or ``dict`` as the plain value.
Standard library only.
"""

import builtins
import collections
import decimal
import fractions
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

MAX_ITEMS = 1_000_000
"""Of an iterator that is sent: it is read to its end, which it may not have."""
MAX_DIGITS = 1_000_000
"""Hexadecimal ones of an integer."""
MAX_FRACTION_DIGITS = 4096
_SAFE_INTEGER = 2**53


class Unsendable(ValueError):
    """A value too large or too deep to be sent."""


class Opaque:
    """A value that stays where it is: equal to itself alone.

    Attributes:
        opaque_number: by which its owner finds it again.
        opaque_kind: its class's name, for people.
    """

    __slots__ = ("opaque_kind", "opaque_number")
    opaque_number: int
    opaque_kind: str

    def __init__(self, number: int, kind: str) -> None:
        object.__setattr__(self, "opaque_number", number)
        object.__setattr__(self, "opaque_kind", kind)

    def __repr__(self) -> str:
        return f"<{self.opaque_kind} object in the program under test>"


def encode(value: Any, keep: Callable[[Any], int] | None = None) -> Any:
    """``value`` as JSON.

    Args:
        keep: stores an object that cannot be sent and returns its number.

    Raises:
        Unsendable: an endless iterator, or nesting beyond Python's limit.
    """
    try:
        return _encode(value, keep or (lambda _: 0))
    except RecursionError:
        raise Unsendable("nested too deeply") from None


def decode(value: Any, find: Callable[[int, str], Any] = Opaque) -> Any:
    """The value that :func:`encode` was given.

    Args:
        find: makes a value of an object's number and class name; :class:`Opaque` by default.

    Raises:
        Unsendable: it is nothing that :func:`encode` writes.
    """
    try:
        return _decode(value, find)
    except Unsendable:
        raise
    except (RecursionError, ArithmeticError, TypeError, ValueError, KeyError) as error:
        raise Unsendable(f"not a value: {type(error).__name__}") from None


def _encode(value: Any, keep: Callable[[Any], int]) -> Any:
    # Content is read through the base classes, past whatever a subclass redefines.
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) <= _SAFE_INTEGER else {"t": "int", "v": f"{number:x}"}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [_encode(item, keep) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return _tagged("tuple", [_encode(item, keep) for item in tuple.__iter__(value)])
    if isinstance(value, dict):
        items = [[_encode(k, keep), _encode(v, keep)] for k, v in dict.items(value)]
        return _tagged("dict", items)
    if isinstance(value, set):
        return _tagged("set", [_encode(item, keep) for item in set.__iter__(value)])
    if isinstance(value, frozenset):
        return _tagged("frozenset", [_encode(item, keep) for item in frozenset.__iter__(value)])
    return _encode_rare(value, keep)


def _encode_rare(value: Any, keep: Callable[[Any], int]) -> Any:
    if isinstance(value, (bytes, bytearray)):
        kind = bytes if isinstance(value, bytes) else bytearray
        return _tagged(kind.__name__, kind.hex(value))  # type: ignore[arg-type]
    if isinstance(value, complex):
        return _tagged(
            "complex", [complex.__complex__(value).real, complex.__complex__(value).imag]
        )
    if type(value) is range:
        parts = (value.start, value.stop, value.step)
        return _tagged("range", [_encode(part, keep) for part in parts])
    if type(value) is fractions.Fraction:
        return _tagged("fraction", [f"{value.numerator:x}", f"{value.denominator:x}"])
    if type(value) is decimal.Decimal:
        return _tagged("decimal", str(value))
    if isinstance(value, collections.deque):
        return _tagged("deque", [_encode(item, keep) for item in collections.deque.__iter__(value)])
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return _encode(value.tolist(), keep)
    if type(value) is type and (name := _builtin_name(value)):
        return _tagged("type", name)
    if isinstance(value, Iterator):
        return _tagged("iterator", [_encode(item, keep) for item in _finite(value)])
    return {"t": "object", "v": keep(value), "c": type(value).__name__}


def _builtin_name(kind: type) -> str:
    return kind.__name__ if vars(builtins).get(kind.__name__) is kind else ""


def _finite(items: Iterator[Any]) -> Iterator[Any]:
    for count, item in enumerate(items):
        if count == MAX_ITEMS:
            raise Unsendable(f"an iterator of more than {MAX_ITEMS:,} items")
        yield item


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {"t": kind, "v": value}


def _decode(value: Any, find: Callable[[int, str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind, body = value["t"], value["v"]
    if kind == "object":
        return find(int(body), str(value["c"])[:100])
    if kind == "int":
        return _integer(body, MAX_DIGITS)
    if kind == "type" and isinstance(getattr(builtins, body, None), type):
        return getattr(builtins, body)
    if kind == "dict":
        return {_decode(key, find): _decode(item, find) for key, item in body}
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(body)
    if kind == "decimal":
        return decimal.Decimal(body)
    if kind == "fraction":
        # Reducing a fraction takes quadratic time.
        return fractions.Fraction(*(_integer(part, MAX_FRACTION_DIGITS) for part in body))
    items = [_decode(item, find) for item in body]
    make = _MAKERS.get(kind)
    if make is None:
        raise Unsendable(f"not a value: {kind!r:.40}")
    return make(items)


_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "deque": collections.deque,
    "iterator": iter,
}


def _integer(digits: str, limit: int) -> int:
    if len(digits) > limit:
        raise Unsendable(f"an integer of more than {limit:,} digits")
    return int(digits, 16)


def same_value(expected: Any, found: Any, *, tolerance: float) -> bool:
    """Whether a program returned what was expected.

    ``found`` is compared as it was sent, without building what it describes: sets and dictionaries
    of chosen numbers can be made to take hours.

    JSON knows no tuples and only text as keys: lists and tuples of equal items are the same, and so
    are dictionaries whose keys have the same text. ``True`` is not 1, but 2 is 2.0. Numbers of which
    one is no integer may differ by ``tolerance``, relative or absolute.

    Args:
        expected: a JSON value.
        found: what :func:`encode` made of the other.
    """
    try:
        return _same(expected, found, tolerance)
    except (RecursionError, ArithmeticError, TypeError, ValueError, KeyError):
        return False


def _same(expected: Any, found: Any, tolerance: float) -> bool:
    if expected is None or isinstance(expected, (bool, str)):
        return type(expected) is type(found) and bool(expected == found)
    if isinstance(expected, (int, float)):
        return _same_number(expected, found, tolerance)
    if isinstance(expected, list):
        if isinstance(found, dict) and found["t"] in ("tuple", "deque", "iterator"):
            found = found["v"]
        return (
            isinstance(found, list)
            and len(expected) == len(found)
            and all(_same(one, two, tolerance) for one, two in zip(expected, found, strict=True))
        )
    if not (isinstance(found, dict) and found["t"] == "dict") or len(found["v"]) != len(expected):
        return False
    items = {_key(key): item for key, item in found["v"]}
    return all(
        key in items and _same(item, items[key], tolerance) for key, item in expected.items()
    )


def _same_number(expected: float, found: Any, tolerance: float) -> bool:
    if found is None or isinstance(found, (bool, str, list)):
        return False
    number = decode(found) if isinstance(found, dict) and found["t"] in _NUMBERS else found
    if isinstance(number, complex):
        if number.imag:
            return False
        number = number.real
    if isinstance(number, dict):
        return False
    if isinstance(expected, int) and isinstance(number, int):
        return expected == number
    real = float(number)
    if math.isnan(expected):
        return math.isnan(real)
    return math.isclose(expected, real, rel_tol=tolerance, abs_tol=tolerance)


_NUMBERS = ("int", "complex", "fraction", "decimal")


def _key(key: Any) -> str | None:
    """A dictionary's key as JSON would write it; ``None``, which no text equals, for odd ones."""
    if isinstance(key, str):
        return key
    if isinstance(key, bool) or key is None:
        return json.dumps(key)
    return str(key) if isinstance(key, (int, float)) else None
