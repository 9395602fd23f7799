"""Twelve ways to change a string of digits, as tasks whose answers a program knows.

A prompt names a family and a string, ``rotl 4821=``; the answer is the changed string, ``8214``.
Every family keeps the length, so that nothing but the digits tells a right answer from a wrong one.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random

from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import TaskError

LENGTH = 4
"""Digits of a string: ten thousand strings a family."""
LICENCE = "CC0-1.0"
END = "="
"""Ends a prompt; the answer follows."""


def _swap_pairs(digits: str) -> str:
    pairs = itertools.zip_longest(digits[::2], digits[1::2], fillvalue="")
    return "".join(second + first for first, second in pairs)


def _shift(amount: int) -> Callable[[str], str]:
    return lambda digits: "".join(str((int(digit) + amount) % 10) for digit in digits)


FAMILIES: Mapping[str, Callable[[str], str]] = {
    "rotl": lambda digits: digits[1:] + digits[:1],
    "rotr": lambda digits: digits[-1:] + digits[:-1],
    "swap": _swap_pairs,
    "sort": lambda digits: "".join(sorted(digits)),
    "desc": lambda digits: "".join(sorted(digits, reverse=True)),
    "flip": lambda digits: digits[::-1],
    "ends": lambda digits: digits[-1] + digits[1:-1] + digits[0],
    "half": lambda digits: digits[LENGTH // 2 :] + digits[: LENGTH // 2],
    "incr": _shift(1),
    "comp": lambda digits: "".join(str(9 - int(digit)) for digit in digits),
    "core": lambda digits: digits[0] + digits[-2:0:-1] + digits[-1],
    "decr": _shift(-1),
}
"""What each family does to a string, by name. Names have four letters, so that prompts of all
families are equally long."""

HELD_BACK = ("core", "decr")
"""Families that no corpus holds: what training does to them is what it does to tasks it never saw."""


def string_task(family: str, digits: str) -> Task:
    """The task of one family and one string.

    Raises:
        TaskError: no such family, or no string of :data:`LENGTH` digits.
    """
    if family not in FAMILIES:
        raise TaskError(f"expected a family of {', '.join(FAMILIES)}, found {family!r:.40}")
    if len(digits) != LENGTH or not (digits.isascii() and digits.isdigit()):
        raise TaskError(f"expected {LENGTH} digits, found {digits!r:.40}")
    return Task(
        id=f"{family}/{digits}",
        kind="exact",
        prompt=f"{family} {digits}{END}",
        answer=FAMILIES[family](digits),
        source=family,
        licence=LICENCE,
    )


def draw_tasks(counts: Mapping[str, int], seed: int, *, without: Sequence[Task] = ()) -> list[Task]:
    """So many tasks of each family, different ones, in a seeded order, none of ``without``.

    Raises:
        TaskError: no such family, or more tasks than it has strings.
    """
    taken = {task.id for task in without}
    generator = Random(f"string families/{seed}")
    drawn = []
    for family, count in counts.items():
        strings = ["".join(digits) for digits in itertools.product("0123456789", repeat=LENGTH)]
        free = [digits for digits in strings if f"{family}/{digits}" not in taken]
        if count > len(free):
            raise TaskError(f"{family}: expected at most {len(free)} tasks, found {count}")
        drawn += [string_task(family, digits) for digits in generator.sample(free, count)]
    generator.shuffle(drawn)
    return drawn
