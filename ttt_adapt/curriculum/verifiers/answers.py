"""Answers that are compared as text: exact ones, letters of a multiple choice, grids."""

import re

from ttt_adapt.curriculum.tasks import LETTERS, Task
from ttt_adapt.curriculum.verdicts import Verdict, no_answer, right_or_wrong
from ttt_adapt.curriculum.verifiers.extraction import (
    FinalAnswer,
    after_thought,
    final_answer,
    normalized,
)

_WHOLE_LETTER = re.compile(r"\W*\(?([A-Z])\)?\W*")
_LEADING_LETTER = re.compile(r"\W*(?:option\s+|choice\s+)?(?:\(([A-Z])\)|([A-Z])(?=[).:,;*\s]|$))")
_SHOWN_LETTER = re.compile(r"\(([A-Z])\)")
_GRID_LINE = re.compile(r"[\s\[]*\d+(?:[\s,]+\d+)*[\s,\]]*")


def verify_exact(task: Task, completion: str, allowed: str) -> Verdict:
    """The final answer against ``task.answer``, up to case, spaces and what stands around."""
    assert task.answer is not None
    found = final_answer(completion, allowed)
    if found is None:
        return no_answer("a final answer")
    num_lines = len([line for line in task.answer.splitlines() if line.strip()])
    text = found.text
    if found.where == "end" and num_lines > 1:
        lines = [line for line in after_thought(completion).splitlines() if line.strip()]
        text = "\n".join(lines[-num_lines:])
    return right_or_wrong(normalized(text) == normalized(task.answer), text, task.answer)


def verify_choice(task: Task, completion: str, allowed: str) -> Verdict:
    """The option that a completion names, by letter or by its whole text."""
    assert task.answer is not None
    choices = [str(choice) for choice in task.meta.get("choices") or ()]
    letters = LETTERS[: len(choices)] if choices else LETTERS
    found = final_answer(completion, allowed)
    if found is None:
        return no_answer("an option's letter")
    letter = _letter(found, letters, choices)
    if letter is None:
        return no_answer(f"one letter from A to {letters[-1]}")
    return right_or_wrong(letter == task.answer, letter, task.answer)


def _letter(found: FinalAnswer, letters: str, choices: list[str]) -> str | None:
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", found.text)
    whole = _WHOLE_LETTER.fullmatch(text)
    if whole:
        return whole[1] if whole[1] in letters else None
    said = [i for i, choice in enumerate(choices) if normalized(choice) == normalized(text)]
    if len(said) == 1:
        return letters[said[0]]
    if found.where != "end":
        # "answer is A dog" names no option: a letter alone, before more text, must be set apart.
        leading = _LEADING_LETTER.match(text)
        if leading and (leading[1] or text[leading.end() : leading.end() + 1] != " "):
            letter = leading[1] or leading[2]
            return letter if letter in letters else None
    shown = {letter for letter in _SHOWN_LETTER.findall(text) if letter in letters}
    return shown.pop() if len(shown) == 1 else None


def verify_grid(task: Task, completion: str) -> Verdict:
    """The last block of lines of numbers against ``task.answer``."""
    assert task.answer is not None
    blocks: list[list[list[str]]] = [[]]
    for line in after_thought(completion).splitlines():
        if _GRID_LINE.fullmatch(line):
            blocks[-1].append(re.findall(r"\d+", line))
        elif blocks[-1]:
            blocks.append([])
    found = [block for block in blocks if block]
    if not found:
        return no_answer("a grid of numbers")
    expected = [line.split() for line in task.answer.splitlines()]
    answer = "\n".join(" ".join(line) for line in found[-1])
    return right_or_wrong(found[-1] == expected, answer, task.answer)
