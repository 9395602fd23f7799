"""Word problems and competition mathematics: GSM8K, MATH, SVAMP."""

from collections.abc import Iterator, Mapping
from typing import Any

from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.curriculum.importers.layout import Draft, Layout, chosen, has, optional_text, text
from ttt_adapt.curriculum.importers.rows import Row
from ttt_adapt.curriculum.settings import TaskSourceSettings
from ttt_adapt.curriculum.verifiers.extraction import last_boxed

GSM8K_MARK = "####"


def _gsm8k(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    solution, mark, answer = text(row.values, "answer").rpartition(GSM8K_MARK)
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise Malformed(f"column 'answer': expected a number after {GSM8K_MARK}, found none")
    problem = text(row.values, "question").strip()
    yield Draft("math", problem, answer, meta={"solution": solution.strip()})


def _math(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    answer = optional_text(row.values, "answer").strip()
    if not answer:
        found = last_boxed(text(row.values, "solution"))
        if found is None or not found.strip():
            raise Malformed(r"column 'solution': expected a final answer in \boxed{}, found none")
        answer = found.strip()
    yield Draft(
        "math",
        text(row.values, "problem").strip(),
        answer,
        meta=chosen(row.values, "subject", "type", "level", "solution"),
        own_id=optional_text(row.values, "unique_id", "id"),
    )


def _svamp(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    body = text(row.values, "Body").strip()
    if body[-1] not in ".!?,":
        body += "."
    number = row.values.get("Answer")
    try:
        value = float(str(number))
    except ValueError:
        raise Malformed(f"column 'Answer': expected a number, found {number!r:.40}") from None
    yield Draft(
        "math",
        f"{body} {text(row.values, 'Question').strip()}",
        str(int(value)) if value.is_integer() else repr(value),
        meta=chosen(row.values, "Equation", "Type"),
        own_id=optional_text(row.values, "ID"),
    )


def _is_gsm8k(values: Mapping[str, Any]) -> bool:
    return has("question", "answer")(values) and GSM8K_MARK in str(values["answer"])


def _is_math(values: Mapping[str, Any]) -> bool:
    return "problem" in values and ("solution" in values or "answer" in values)


LAYOUTS = (
    Layout("gsm8k", "question, answer (ending in #### and a number)", _is_gsm8k, _gsm8k, "MIT"),
    Layout("svamp", "Body, Question, Answer", has("Body", "Question", "Answer"), _svamp, "MIT"),
    Layout("math", "problem, solution or answer", _is_math, _math, "MIT"),
)
