"""Where a completion's final answer stands."""

import time

import pytest

from ttt_adapt.curriculum.verifiers import FinalAnswer, final_answer, last_boxed
from ttt_adapt.curriculum.verifiers.extraction import first_number, last_number, normalized


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"\boxed {a}", "a"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{never closed", "1"),
        (r"\boxed{", None),
        (r"\boxed", None),
        ("", None),
        (r"\boxed{}", ""),
        (r"\boxed{a \boxed{b} c}", "b"),
    ],
)
def test_the_last_closed_box_counts(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("completion", "allowed", "expected"),
    [
        (r"The answer is 3. \boxed{4}", "any", FinalAnswer("4", "boxed")),
        ("The answer is 3.\nBye", "any", FinalAnswer("3.", "marked")),
        ("The answer is 3. The final answer is: 4", "any", FinalAnswer("4", "marked")),
        ("**Answer:** B", "any", FinalAnswer("B", "marked")),
        ("so\n#### 12", "any", FinalAnswer("12", "marked")),
        ("one\ntwo\n\n", "any", FinalAnswer("two", "end")),
        ("The answer is 3.", "boxed", None),
        ("3", "marked", None),
        ("\n \n", "any", None),
        ("", "any", None),
        (r"\boxed{1}</think> 2", "any", FinalAnswer("2", "end")),
        (r"\boxed{ }", "any", None),
        ("the answer is\n", "marked", None),
    ],
)
def test_final_answers(completion: str, allowed: str, expected: FinalAnswer | None) -> None:
    assert final_answer(completion, allowed) == expected


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("I have 3 apples and 1,234.50 pears", "3", "1234.50"),
        ("-5 to +7", "-5", "+7"),
        ("x2y .5 9.", ".5", "9"),
        ("none", None, None),
        ("1,23 4", "1", "4"),
        ("$18 a day", "18", "18"),
    ],
)
def test_numbers(text: str, first: str | None, last: str | None) -> None:
    assert first_number(text) == first
    assert last_number(text) == last


def test_long_input_takes_no_long_time() -> None:
    """Anything quadratic would take minutes over these."""
    began = time.process_time()
    for piece in (
        "1,",
        "\\boxed{",
        "answer is ",
        "answer is\n",
        "-",
        " ",
        "\\text{",
        "{",
        "}",
        "answer ",
    ):
        text = piece * 30_000
        final_answer(text, "any")
        last_number(text)
        normalized(text + "}" * 30_000)
    assert time.process_time() - began < 10.0


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("Yes.", "yes"),
        ("**apple  pear**", "Apple Pear"),
        (r"\text{Evelyn}", "evelyn"),
        (r"\textbf{\text{no}}", "No!"),
        ("“quoted”", "quoted"),
        ("ﬁne", "fine"),
    ],
)
def test_what_does_not_count_in_text(one: str, two: str) -> None:
    assert normalized(one) == normalized(two)
