"""Which layers are converted: every way to say it, and every way to say it wrong."""

import pytest

from ttt_adapt.errors import SettingsError
from ttt_adapt.models.conversion import choose_layers


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("all", (0, 1, 2, 3, 4, 5)),
        ("none", ()),
        (" ALL ", (0, 1, 2, 3, 4, 5)),
        ("0,3,5", (0, 3, 5)),
        ("5, 0,0", (0, 5)),
        ("1-3,5", (1, 2, 3, 5)),
        ("every-1", (0, 1, 2, 3, 4, 5)),
        ("every-2", (1, 3, 5)),
        ("every-4", (3,)),
        ("first-2", (0, 1)),
        ("last-4", (2, 3, 4, 5)),
        ("last-6", (0, 1, 2, 3, 4, 5)),
    ],
)
def test_a_choice_in_words(choice: str, expected: tuple[int, ...]) -> None:
    assert choose_layers(choice, 6) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("most", "expected all, none, indices such as 0,3,5-7, every-N, first-N or last-N, found"),
        ("", "found ''"),
        ("1,,2", "found '1,,2'"),
        ("-1", "found '-1'"),
        ("6", "expected ascending indices from 0 to 5, found '6'"),
        ("3-1", "found '3-1' in '3-1'"),
        ("last-7", "expected last-N with N from 1 to 6, the model's number of layers, found"),
        ("every-0", "expected every-N with N from 1 to 6"),
    ],
)
def test_a_choice_that_means_nothing(choice: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        choose_layers(choice, 6)
    assert expected in str(caught.value)
