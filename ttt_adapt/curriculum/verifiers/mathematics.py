r"""Final answers of mathematics: plain numbers here, everything else by Math-Verify in a process
that can be killed.

Only the last ``\boxed{}`` (or marked answer, or number) is looked at, so that a completion cannot
offer several. Text that equals the answer and numbers that equal it need no process.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from threading import Lock
from typing import Any

from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.verdicts import TOO_LONG, Verdict, no_answer, not_verified, right_or_wrong
from ttt_adapt.curriculum.verifiers.checking_process import CheckFailed
from ttt_adapt.curriculum.verifiers.extraction import (
    final_answer,
    first_number,
    last_number,
    normalized,
)

CACHE_SIZE = 20_000
MAX_DIGITS = 100
_PLAIN = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d+)?")
_DECORATION = re.compile(r"\\[!,;:% ]|\\\$|\\dots|[$€£]|\\left|\\right|\s+")

Ask = Callable[[dict[str, Any]], dict[str, Any]]


class EqualAnswers:
    """Which answers were found equal, so that no pair is compared twice."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._lock = Lock()

    def get(self, pair: tuple[str, str]) -> bool | None:
        with self._lock:
            return self._known.get(pair)

    def add(self, pair: tuple[str, str], is_equal: bool) -> None:
        with self._lock:
            self._known[pair] = is_equal
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)


def verify_math(
    task: Task,
    completion: str,
    *,
    allowed: str,
    max_characters: int,
    ask: Ask,
    known: EqualAnswers,
) -> Verdict:
    """The final answer against ``task.answer``, as mathematics.

    Args:
        allowed: as :func:`final_answer` takes it.
        max_characters: a longer final answer is wrong.
        ask: has the checking process compare; raises :class:`CheckFailed`.
    """
    assert task.answer is not None
    found = _answer(completion, task.answer, allowed)
    if found is None:
        return no_answer("a final answer")
    if len(found) > max_characters:
        return Verdict(0.0, TOO_LONG, f"{len(found):,} characters, at most {max_characters:,}")
    if _bare(found) == _bare(task.answer):
        return right_or_wrong(True, found, task.answer)
    one, two = plain_number(task.answer), plain_number(found)
    if one is not None and two is not None:
        return right_or_wrong(one == two, found, task.answer)
    pair = (task.answer, found)
    is_equal = known.get(pair)
    if is_equal is None:
        try:
            reply = ask({"do": "math", "expected": task.answer, "found": found})
        except CheckFailed as error:
            return not_verified(f"Math-Verify: {error}")
        if "error" in reply:
            return not_verified(f"Math-Verify: {reply['error']}")
        is_equal = bool(reply["equal"])
        known.add(pair, is_equal)
    return right_or_wrong(is_equal, found, task.answer)


def plain_number(text: str) -> Fraction | None:
    """The value of a number written with digits alone; ``None`` for anything else."""
    bare = _bare(text)
    if not _PLAIN.fullmatch(bare) or not any(map(str.isdigit, bare)) or len(bare) > MAX_DIGITS:
        return None
    return Fraction(bare.replace(",", ""))


def _answer(completion: str, expected: str, allowed: str) -> str | None:
    found = final_answer(completion, allowed)
    if found is None or found.where == "boxed":
        return found.text if found else None
    text = found.text.strip().rstrip(".")
    if found.where == "marked":
        # "The answer is 18 dollars a day."
        if plain_number(expected) is not None and plain_number(text) is None:
            return first_number(text)
        return text
    if plain_number(expected) is not None:
        return last_number(completion)
    return text


def _bare(text: str) -> str:
    return _DECORATION.sub("", normalized(text))
