"""Windows: every token once, never more read than fits, and the harness' own windows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.errors import SettingsError
from ttt_adapt.evaluation.windows import Window, make_windows

BEGINNING = -1


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, object]:
    max_length = draw(st.integers(1, 12))
    return {
        "text": list(range(1000, 1000 + draw(st.integers(0, 40)))),
        "max_length": max_length,
        "stride": draw(st.none() | st.integers(1, max_length)),
        "prefix": list(range(2000, 2000 + draw(st.integers(0, 30)))),
        "context": list(range(3000, 3000 + draw(st.integers(0, 30)))),
    }


def windows_of(case: dict[str, object]) -> list[Window]:
    return make_windows(beginning=BEGINNING, **case)  # type: ignore[arg-type]


@settings(deadline=None)
@given(arguments())
def test_every_token_is_scored_exactly_once_and_no_window_is_too_long(
    case: dict[str, object],
) -> None:
    windows = windows_of(case)
    assert [token for window in windows for token in window.targets()] == case["text"]
    for window in windows:
        read = window.read()
        assert 1 <= window.num_scored <= window.num_read == len(read) <= case["max_length"]  # type: ignore[operator]
        # A target is predicted from what was read right before it: all but the last are read too.
        assert window.num_scored == 1 or read[-(window.num_scored - 1) :] == window.targets()[:-1]


@settings(deadline=None)
@given(arguments())
def test_what_is_read_is_beginning_then_prefix_then_what_came_before(
    case: dict[str, object],
) -> None:
    prefix, context, text = (list(case[name]) for name in ("prefix", "context", "text"))  # type: ignore[call-overload]
    windows = windows_of(case)
    heads = {window.head for window in windows[1:]}
    for position, window in enumerate(windows):
        if position == 0:
            assert window.head[0] == BEGINNING
            kept = list(window.head[1:])
            assert kept == prefix[len(prefix) - len(kept) :]
            assert heads <= {window.head if kept else ()}
        sequence = context + text
        body = window.read()[len(window.head) :]
        last = len(context) + text.index(window.targets()[-1])
        assert body == sequence[last - len(body) : last]


@settings(deadline=None)
@given(arguments())
def test_prefix_and_context_leave_the_text_its_share(case: dict[str, object]) -> None:
    windows = windows_of(case)
    if not windows:
        return
    num_text, length = len(case["text"]), case["max_length"]  # type: ignore[arg-type]
    first = windows[0]
    reserved = first.num_read - first.num_scored  # the beginning token stands for one of the text
    assert isinstance(length, int)
    assert reserved <= max(length // 2, length - num_text)
    if num_text <= length // 2:
        assert len(windows) == 1
        asked = len(case["prefix"]) + len(case["context"])  # type: ignore[arg-type]
        assert reserved == min(asked, length - num_text)


def test_disjoint_windows_by_hand() -> None:
    windows = make_windows([1, 2, 3, 4, 5, 6, 7], beginning=0, max_length=3)
    assert [(window.read(), window.targets()) for window in windows] == [
        ([0, 1, 2], [1, 2, 3]),
        ([3, 4, 5], [4, 5, 6]),
        ([4, 5, 6], [7]),
    ]


def test_a_stride_rereads_context_by_hand() -> None:
    windows = make_windows([1, 2, 3, 4, 5, 6, 7], beginning=0, max_length=4, stride=2)
    assert [(window.read(), window.targets()) for window in windows] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([2, 3, 4, 5], [5, 6]),
        ([3, 4, 5, 6], [7]),
    ]


def test_a_prefix_returns_in_every_window_by_hand() -> None:
    windows = make_windows(
        [1, 2, 3, 4, 5, 6, 7], beginning=0, max_length=6, prefix=[90, 91, 92, 93]
    )
    assert [(window.read(), window.targets()) for window in windows] == [
        ([0, 91, 92, 93, 1, 2], [1, 2, 3]),
        ([0, 91, 92, 93, 3, 4], [4, 5]),
        ([0, 91, 92, 93, 5, 6], [6, 7]),
    ]


def test_a_short_text_leaves_the_prefix_all_it_does_not_need() -> None:
    (window,) = make_windows([1, 2], beginning=0, max_length=8, prefix=list(range(90, 99)))
    assert window.read() == [0, 93, 94, 95, 96, 97, 98, 1]
    assert window.targets() == [1, 2]


def test_a_context_is_not_repeated() -> None:
    text = [1, 2, 3, 4, 5, 6]
    disjoint = make_windows(text, beginning=0, max_length=4, context=[80, 81, 82])
    assert [window.read() for window in disjoint] == [[0, 81, 82, 1], [2, 3, 4, 5]]
    strided = make_windows(text, beginning=0, max_length=4, stride=1, context=[80, 81, 82])
    assert [window.read() for window in strided] == [
        [0, 81, 82, 1],
        [81, 82, 1, 2],
        [82, 1, 2, 3],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
    ]


def test_prefix_and_context_are_each_sure_of_half() -> None:
    def opening(num_prefix: int, num_context: int) -> tuple[int, int]:
        (window,) = make_windows(
            [1, 2],
            beginning=0,
            max_length=10,
            prefix=[90] * num_prefix,
            context=[80] * num_context,
        )
        return window.read().count(90), window.read().count(80)

    assert opening(20, 20) == (4, 4)
    assert opening(1, 20) == (1, 7)
    assert opening(20, 1) == (7, 1)
    assert opening(2, 3) == (2, 3)


def test_no_tokens_no_windows() -> None:
    assert make_windows([], beginning=0, max_length=4, prefix=[1], context=[2]) == []


@pytest.mark.parametrize("stride", [0, 5])
def test_a_stride_that_would_lose_tokens_is_refused(stride: int) -> None:
    with pytest.raises(SettingsError, match=rf"between 1 and max_length \(4\), found {stride}"):
        make_windows([1], beginning=0, max_length=4, stride=stride)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_length must be at least 1 token, found 0"):
        make_windows([1], beginning=0, max_length=0)
