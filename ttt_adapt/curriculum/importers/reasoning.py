"""BIG-Bench-Hard, multiple choice of several data sets, and ARC-AGI's grids."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.curriculum.importers.layout import Draft, Layout, chosen, has, optional_text, text
from ttt_adapt.curriculum.importers.rows import Row
from ttt_adapt.curriculum.settings import TaskSourceSettings
from ttt_adapt.curriculum.tasks import LETTERS

_LETTER = re.compile(r"\(([A-Z])\)")
_OPTION = re.compile(r"^\(([A-Z])\) ?(.*)$", re.MULTILINE)
_INTEGER = re.compile(r"-?\d+")


def _big_bench_hard(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    examples = row.values.get("examples", [row.values])
    subtask = optional_text(row.values, "task") or row.stem
    if not isinstance(examples, list):
        raise Malformed("column 'examples': expected a list")
    for position, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise Malformed(f"example {position}: expected an object")
        number = optional_text(example, "id") or str(position)
        yield _example(example, subtask, f"{subtask}/{number}")


def _example(example: Mapping[str, Any], subtask: str, own_id: str) -> Draft:
    problem, target = text(example, "input"), text(example, "target").strip()
    # Its authors ask that it be kept out of what models are trained on.
    meta: dict[str, Any] = {"subtask": subtask, "evaluation_only": True}
    kind = "math" if _INTEGER.fullmatch(target) else "exact"
    letter = _LETTER.fullmatch(target)
    if letter:
        options = _OPTION.findall(problem)
        letters = "".join(option[0] for option in options)
        if len(options) > 1 and LETTERS.startswith(letters) and letter[1] in letters:
            kind, target = "choice", letter[1]
            meta["choices"] = [option[1].strip() for option in options]
    return Draft(kind, problem, target, meta=meta, own_id=own_id)


def _multiple_choice(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    values = row.values
    column = next(name for name in ("choices", "options") if name in values)
    options: Any = values[column]
    labels = None
    if isinstance(options, Mapping):
        options, labels = options.get("text"), options.get("label")
    answer = next((values[n] for n in ("answerKey", "answer", "label") if n in values), None)
    yield choice_draft(
        text(values, "question"),
        options,
        answer,
        labels=labels,
        meta=chosen(values, "subject", "category"),
        own_id=optional_text(values, "id", "question_id"),
    )


def choice_draft(
    question: str,
    options: Any,
    answer: Any,
    *,
    labels: Any = None,
    meta: Mapping[str, Any] | None = None,
    own_id: str = "",
) -> Draft:
    """A multiple choice with lettered options below the question.

    Args:
        answer: a letter, a label, a position from 0, or an option's text.

    Raises:
        Malformed: the options are no list of texts, or the answer is none of them.
    """
    if (
        not isinstance(options, (list, tuple))
        or not 2 <= len(options) <= len(LETTERS)
        or not all(isinstance(option, str) for option in options)
    ):
        raise Malformed(f"expected 2 to {len(LETTERS)} options, found {options!r:.60}")
    position = _position(answer, list(options), labels)
    lines = [f"({LETTERS[i]}) {option}" for i, option in enumerate(options)]
    problem = "\n".join([question.strip(), *lines])
    own = {**(meta or {}), "choices": list(options)}
    return Draft("choice", problem, LETTERS[position], meta=own, own_id=own_id)


def _position(answer: Any, options: list[str], labels: Any) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        return answer
    if isinstance(answer, str):
        if isinstance(labels, list) and answer in labels:
            return labels.index(answer)
        if len(answer) == 1 and answer in LETTERS[: len(options)]:
            return LETTERS.index(answer)
        if options.count(answer) == 1:
            return options.index(answer)
        if answer.isdecimal() and int(answer) < len(options):
            return int(answer)
    raise Malformed(f"expected a letter, position or text of one option, found {answer!r:.60}")


def _arc_agi(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    name = optional_text(row.values, "task_id", "id") or row.stem
    shown = [
        f"Input:\n{_grid(pair, 'input')}\nOutput:\n{_grid(pair, 'output')}"
        for pair in _pairs(row.values, "train")
    ]
    pairs = _pairs(row.values, "test")
    for number, pair in enumerate(pairs):
        asked = f"Input:\n{_grid(pair, 'input')}\nOutput:"
        yield Draft(
            "grid",
            "\n\n".join([*shown, asked]),
            _grid(pair, "output"),
            own_id=name if len(pairs) == 1 else f"{name}/{number}",
        )


def _pairs(values: Mapping[str, Any], column: str) -> list[Any]:
    pairs = values[column]
    if not isinstance(pairs, list) or not pairs:
        raise Malformed(f"column {column!r}: expected pairs of grids, found {pairs!r:.40}")
    return pairs


def _grid(pair: Any, side: str) -> str:
    grid = pair.get(side) if isinstance(pair, Mapping) else None
    if (
        not isinstance(grid, list)
        or not grid
        or not all(isinstance(line, list) and len(line) == len(grid[0]) > 0 for line in grid)
        or not all(type(cell) is int and 0 <= cell <= 9 for line in grid for cell in line)
    ):
        raise Malformed(f"{side}: expected a grid of digits, found {grid!r:.60}")
    return "\n".join(" ".join(str(cell) for cell in line) for line in grid)


def _is_choice(values: Mapping[str, Any]) -> bool:
    return "question" in values and ("choices" in values or "options" in values)


def _is_big_bench_hard(values: Mapping[str, Any]) -> bool:
    return has("input", "target")(values) or has("canary", "examples")(values)


LAYOUTS = (
    Layout("arc-agi", "train, test (pairs of grids)", has("train", "test"), _arc_agi, "Apache-2.0"),
    Layout(
        "big-bench-hard", "input, target; or examples", _is_big_bench_hard, _big_bench_hard, "MIT"
    ),
    Layout("choice", "question, choices or options, answer", _is_choice, _multiple_choice),
)
