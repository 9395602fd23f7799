"""What a completion of a task is worth, and why; or that it could not be found out."""

from collections.abc import Sequence
from dataclasses import dataclass

CORRECT = "correct"
WRONG = "wrong"
NO_ANSWER = "no answer"
TOO_LONG = "answer too long"
NOT_VERIFIED = "not verified"


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One test of a program.

    Attributes:
        passed: ``None`` where it could not be found out.
        detail: one line for people: empty where it passed.
    """

    passed: bool | None
    detail: str = ""

    __test__ = False  # no test of ours, whatever its name says


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward, or none, with the reason.

    Attributes:
        reward: 0.0 to 1.0 (what a user's callable returns may be anything finite). ``None``: the
            harness failed, not the completion; such a completion teaches nothing and must not be
            counted as wrong.
        reason: one of few: ``correct``, ``wrong``, ``no answer``, ``answer too long``; for
            programs ``passed 3 of 4 tests``; for ``None`` ``not verified``.
        detail: one line for people.
        answer: what was taken for the final answer, where there is such a thing.
        tests: of a program, those that were run.
    """

    reward: float | None
    reason: str
    detail: str = ""
    answer: str | None = None
    tests: tuple[TestOutcome, ...] = ()

    @property
    def is_absent(self) -> bool:
        """Whether nothing is known of the completion."""
        return self.reward is None


def right_or_wrong(is_right: bool, answer: str, expected: str) -> Verdict:
    """The verdict on a final answer."""
    if is_right:
        return Verdict(1.0, CORRECT, answer=answer)
    return Verdict(0.0, WRONG, f"expected {expected!r:.100}, found {answer!r:.100}", answer)


def no_answer(looked_for: str) -> Verdict:
    """The verdict on a completion without a final answer."""
    return Verdict(0.0, NO_ANSWER, f"expected {looked_for}, found none")


def not_verified(detail: str, tests: Sequence[TestOutcome] = ()) -> Verdict:
    """The harness failed."""
    return Verdict(None, NOT_VERIFIED, " ".join(detail.split())[:500], tests=tuple(tests))
