r"""Finding the final answer in a completion: ``\boxed{}``, after a mark, or at its end."""

import re
import unicodedata
from dataclasses import dataclass

_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|(?<!\\)[{}]")
_MARK = re.compile(
    r"####|\b(?:final[ \t]{1,4})?answer[ \t]{0,4}(?:\*\*)?[ \t]{0,4}(?:is|:)(?:[ \t]{0,4}(?:\*\*|:))*",
    re.IGNORECASE,
)
MAX_WRAPPERS = 10
_THOUGHT_ENDS = "</think>"
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))")
_WRAPPERS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{([^{}]*)\}")
_EDGES = " \t\r\n.,;:!?\"'`*$“”‘’"


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """What a completion says in the end.

    Attributes:
        text: as it stands there.
        where: ``boxed``, ``marked`` or ``end`` (the last line that is not empty).
    """

    text: str
    where: str


def final_answer(completion: str, allowed: str) -> FinalAnswer | None:
    """The last boxed answer; without one the last marked one; without one the last line.

    Only the last one counts: a completion that names several answers is taken at its last word.

    Args:
        allowed: ``boxed``, ``marked`` or ``any``: what to look for at most.
    """
    said = after_thought(completion)
    boxed = last_boxed(said)
    if boxed is not None:
        return FinalAnswer(boxed.strip(), "boxed") if boxed.strip() else None
    if allowed == "boxed":
        return None
    marked = _last_marked(said)
    if marked is not None:
        return FinalAnswer(marked, "marked")
    if allowed == "marked":
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return FinalAnswer(lines[-1], "end") if lines else None


def after_thought(completion: str) -> str:
    """What follows a model's thinking, where it is set apart with ``</think>``."""
    return completion.rpartition(_THOUGHT_ENDS)[2]


def _last_marked(text: str) -> str | None:
    """What follows the last mark that anything follows on its line."""
    for match in reversed(list(_MARK.finditer(text))):
        end = text.find("\n", match.end())
        line = text[match.end() : end if end >= 0 else len(text)].strip()
        if line:
            return line
    return None


def last_boxed(text: str) -> str | None:
    r"""What the ``\boxed{}`` that begins last holds, braces matched; ``None`` without a closed one."""
    opened: list[tuple[bool, int]] = []
    start, end = -1, -1
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            opened.append((match[0] != "{", match.end()))
        elif opened:
            is_box, begun = opened.pop()
            if is_box and begun > start:
                start, end = begun, match.start()
    return text[start:end] if start >= 0 else None


def last_number(text: str) -> str | None:
    """The last number of a text, thousands separators removed."""
    found = [match[0] for match in _NUMBER.finditer(text) if any(map(str.isdigit, match[0]))]
    return found[-1].replace(",", "") if found else None


def first_number(text: str) -> str | None:
    """The first number of a text, thousands separators removed."""
    found = (match[0] for match in _NUMBER.finditer(text) if any(map(str.isdigit, match[0])))
    return next((number.replace(",", "") for number in found), None)


def normalized(text: str) -> str:
    """Text as it is compared: case, width, white space and what stands around it do not count."""
    for _ in range(MAX_WRAPPERS):
        bare = _WRAPPERS.sub(r"\1", text)
        if bare == text:
            break
        text = bare
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split()).strip(_EDGES)
