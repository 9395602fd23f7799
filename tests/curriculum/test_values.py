"""Values between processes: exact content, no behaviour."""

import decimal
import fractions
import json
import socket
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttt_adapt.curriculum.sandbox import frames
from ttt_adapt.curriculum.sandbox.values import (
    MAX_ITEMS,
    Opaque,
    Unsendable,
    decode,
    encode,
    same_value,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
HASHABLE = st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    HASHABLE | st.none() | st.complex_numbers(allow_nan=False) | st.fractions(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=3)
        | st.frozensets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=10,
)


def sent(value: Any) -> Any:
    return json.loads(json.dumps(encode(value)))


@given(PLAIN)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    arrived = decode(sent(value))
    assert arrived == value
    assert type(arrived) is type(value)


@given(JSON)
def test_a_json_value_equals_itself(value: Any) -> None:
    assert same_value(value, sent(value), tolerance=0.0)


@given(JSON, JSON)
def test_different_json_values_differ(one: Any, two: Any) -> None:
    def plain(value: Any) -> Any:
        """What Python calls equal and JSON does not: numbers and truth values are kept apart."""
        if isinstance(value, bool) or value is None:
            return repr(value)
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return ("number", value) if isinstance(value, (int, float)) else value

    assert same_value(one, sent(two), tolerance=0.0) == (plain(one) == plain(two))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (decimal.Decimal("1.50"), decimal.Decimal("1.50")),
        (range(1, 9, 2), range(1, 9, 2)),
        (bytearray(b"\x00\xff"), bytearray(b"\x00\xff")),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (deque([1, 2]), deque([1, 2])),
        (float("inf"), float("inf")),
        (10**400, 10**400),
        ([int, dict, ValueError], [int, dict, ValueError]),
        (-(2**60), -(2**60)),
        (fractions.Fraction(-2, 6), fractions.Fraction(-1, 3)),
    ],
)
def test_rarer_values(value: Any, expected: Any) -> None:
    assert decode(sent(value)) == expected


def test_iterators_are_read_and_endless_ones_refused() -> None:
    assert list(decode(sent(x * x for x in range(3)))) == [0, 1, 4]
    with pytest.raises(Unsendable, match=f"{MAX_ITEMS:,}"):
        encode(iter(int, 1))


def test_objects_stay_where_they_are() -> None:
    class Anything:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Number(int):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    kept: list[Any] = []
    arrived = decode(encode([Anything()], lambda value: kept.append(value) or 7))[0]  # type: ignore[func-returns-value]
    assert isinstance(arrived, Opaque)
    assert (arrived.opaque_number, arrived.opaque_kind, len(kept)) == (7, "Anything", 1)
    assert arrived != 42  # type: ignore[comparison-overlap]
    assert not same_value(42, encode(Anything()), tolerance=0.0)
    assert not same_value(None, encode(Anything()), tolerance=0.0)
    assert decode(encode(Number(5))) == 5
    assert not same_value(42, encode(Number(5)), tolerance=0.0)


@pytest.mark.parametrize(
    "hostile",
    [
        {},
        {"t": "tuple"},
        {"t": "int", "v": "f" * 2_000_000},
        {"t": "int", "v": "zz"},
        {"t": "fraction", "v": ["1", "0"]},
        {"t": "fraction", "v": ["1", "f" * 100_000]},
        {"t": "complex", "v": [1, 2, 3]},
        {"t": "range", "v": [1, 2, 0]},
        {"t": "dict", "v": [[[], 1]]},
        {"t": "set", "v": [[]]},
        {"t": "eval", "v": "1"},
        {"t": "type", "v": "print"},
        {"t": "type", "v": 1},
        {"t": "decimal", "v": "x"},
        {"t": "object", "v": "x", "c": 1},
    ],
)
def test_what_is_no_value_is_refused(hostile: Any) -> None:
    with pytest.raises(Unsendable):
        decode(hostile)
    for expected in (1, 1.5, None, True, "x", [], [1], {}, {"1": 1}):
        assert not same_value(expected, hostile, tolerance=1e-6)


def test_numbers_and_their_tolerance() -> None:
    assert same_value(0.3, sent(0.1 + 0.2), tolerance=1e-9)
    assert not same_value(0.3, sent(0.3001), tolerance=1e-6)
    assert same_value(2, sent(2.0), tolerance=0.0)
    assert same_value(0.5, sent(fractions.Fraction(1, 2)), tolerance=0.0)
    assert same_value(1, sent(1 + 0j), tolerance=0.0)
    assert not same_value(1, sent(1j), tolerance=1.0)
    assert not same_value(1, sent(True), tolerance=0.0)
    assert not same_value(True, sent(1), tolerance=0.0)
    assert not same_value(10**30, sent(10**30 + 1), tolerance=1e-6)
    assert same_value(float("nan"), sent(float("nan")), tolerance=0.0)
    assert not same_value(1.0, sent("1.0"), tolerance=0.0)


def test_nesting_is_no_crash() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Unsendable, match="deeply"):
        encode(deep)
    one: Any = []
    for _ in range(500):
        one = {"t": "tuple", "v": [one]}
    assert not same_value([], one, tolerance=0.0)


def test_messages_carry_descriptors_and_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as other:
        frames.send(ours, {"x": "é\ud800"}, (other.fileno(),))
        value, (descriptor,) = frames.receive_with_descriptors(theirs, 1)
        socket.close(descriptor)
        assert value == {"x": "é\ud800"}
        for bad in (b"\0\0\0\4nope", b"\xff\xff\xff\xff", b"\0\0\0\7" + b"[" * 7):
            ours.sendall(bad)
            with pytest.raises(frames.BadFrame):
                frames.receive(theirs, 100)
        ours.sendall(b"\0\0\0\x09ab")
        ours.close()
        with pytest.raises(frames.BadFrame, match="cut short"):
            frames.receive(theirs)
        assert frames.receive(theirs) is None
