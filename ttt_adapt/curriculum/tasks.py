"""What a curriculum is made of: a prompt, and what tells whether a completion of it is right."""

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttt_adapt.errors import TaskError

KINDS = ("math", "choice", "exact", "regex", "grid", "code")
"""Kinds that are verified here; any other is for a callable of the user's own."""
LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A whole program: what it reads and what it must write."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """One call of a function.

    Attributes:
        function: its name, at the program's top level or in a class ``Solution``.
        arguments: positional ones, as JSON values.
        keywords: by name, as JSON values.
        returns: what it must return, as a JSON value (lists stand for tuples too).
    """

    function: str
    arguments: tuple[Any, ...]
    returns: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckTest:
    """Python that calls functions of the program and raises where they are wrong.

    Attributes:
        code: runs in a process of its own, apart from the program.
        functions: names of the program that ``code`` calls.
    """

    code: str
    functions: tuple[str, ...]


CodeTest = StdinTest | CallTest | CheckTest


@dataclass(frozen=True, slots=True)
class CodeTests:
    """How a program is tested.

    Attributes:
        cases: at least one.
        prefix: Python that the completion continues or relies on (a signature, imports, classes);
            checks rely on it too, where it compiles by itself.
        time_limit_s: the task's own, for each case; ``None``: the sandbox's.
    """

    cases: tuple[CodeTest, ...]
    prefix: str = ""
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A problem whose solutions can be verified.

    Attributes:
        id: stable across runs and unique in its corpus.
        kind: how a completion is verified: one of :data:`KINDS`, or a name that a callable is
            given for.
        prompt: what the model reads.
        answer: what a completion's final answer must equal (``math``, ``exact``), match
            (``regex``), be (``choice``: a capital letter; ``grid``: lines of numbers).
        tests: of ``code``, instead of an answer.
        source: where it came from, for people and for counting (``gsm8k``).
        licence: as its source states it.
        meta: further facts as JSON values. ``choices`` of a multiple choice: its options' texts;
            ``problem``: the problem alone where the prompt has instructions or examples around
            it, which is what is compared for duplicates and contamination.

    Raises:
        TaskError: a value is missing, of the wrong kind, or has no UTF-8 form.
    """

    id: str
    kind: str
    prompt: str
    answer: str | None = None
    tests: CodeTests | None = None
    source: str = ""
    licence: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise TaskError(f"task {self.id!r:.80}: {problem}")

    @property
    def problem(self) -> str:
        """The problem alone: ``meta["problem"]`` where there is one, else the prompt."""
        return str(self.meta.get("problem") or self.prompt)


def to_json(task: Task) -> dict[str, Any]:
    """A task as one JSON object; what is empty is left out."""
    values: dict[str, Any] = {"id": task.id, "kind": task.kind, "prompt": task.prompt}
    if task.answer is not None:
        values["answer"] = task.answer
    if task.tests is not None:
        values["tests"] = _tests_to_json(task.tests)
    values |= {k: v for k, v in (("source", task.source), ("licence", task.licence)) if v}
    if task.meta:
        values["meta"] = dict(task.meta)
    return values


def from_json(values: Mapping[str, Any]) -> Task:
    """The task that :func:`to_json` wrote.

    Raises:
        TaskError: a key is missing or unknown, or a value of the wrong kind.
    """
    known = ("id", "kind", "prompt", "answer", "tests", "source", "licence", "meta")
    unknown = [key for key in values if key not in known]
    if unknown:
        raise TaskError(f"expected {', '.join(known)}, found {', '.join(map(repr, unknown))}")
    missing = [key for key in known[:3] if key not in values]
    if missing:
        raise TaskError(f"no {' and no '.join(missing)}; found: {', '.join(values) or 'nothing'}")
    rest = {key: value for key, value in values.items() if key != "tests"}
    tests = values.get("tests")
    return Task(**rest, tests=None if tests is None else _tests_from_json(tests))


def _tests_to_json(tests: CodeTests) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    for case in tests.cases:
        if isinstance(case, StdinTest):
            cases.append({"stdin": case.stdin, "stdout": case.stdout})
        elif isinstance(case, CallTest):
            call: dict[str, Any] = {"call": case.function, "arguments": list(case.arguments)}
            if case.keywords:
                call["keywords"] = dict(case.keywords)
            cases.append(call | {"returns": case.returns})
        else:
            cases.append({"check": case.code, "functions": list(case.functions)})
    result: dict[str, Any] = {"cases": cases}
    if tests.prefix:
        result["prefix"] = tests.prefix
    if tests.time_limit_s is not None:
        result["time_limit_s"] = tests.time_limit_s
    return result


def _tests_from_json(values: Any) -> CodeTests:
    try:
        extra = set(values) - {"cases", "prefix", "time_limit_s"}
        if extra:
            raise TaskError(f"tests: unknown {', '.join(sorted(extra))}")
        cases = tuple(_case(item) for item in values["cases"])
        return CodeTests(cases, values.get("prefix", ""), values.get("time_limit_s"))
    except (KeyError, TypeError, AttributeError):
        raise TaskError(
            "tests: expected cases of {stdin, stdout}, {call, arguments, returns} or "
            f"{{check, functions}}, found {values!r:.80}"
        ) from None


def _case(values: Any) -> CodeTest:
    keys = set(values)
    if keys == {"stdin", "stdout"}:
        return StdinTest(**values)
    if keys - {"keywords"} == {"call", "arguments", "returns"}:
        return CallTest(
            values["call"],
            tuple(values["arguments"]),
            values["returns"],
            values.get("keywords", {}),
        )
    if keys == {"check", "functions"}:
        return CheckTest(values["check"], tuple(values["functions"]))
    raise KeyError(keys)


def _problem(task: Task) -> str:
    texts = {"id": task.id, "kind": task.kind, "prompt": task.prompt, "source": task.source}
    texts |= {"licence": task.licence, "answer": task.answer or ""}
    for name, value in texts.items():
        if not isinstance(value, str):
            return f"{name}: expected text, found {type(value).__name__}"
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            return f"{name}: an unpaired surrogate has no UTF-8 form"
    for name in ("id", "kind", "prompt"):
        if not texts[name].strip():
            return f"{name}: expected text, found none"
    if not isinstance(task.meta, Mapping):
        return f"meta: expected an object, found {type(task.meta).__name__}"
    if task.kind == "code":
        return (
            "kind code: expected tests, found none"
            if task.tests is None
            else _bad_tests(task.tests)
        )
    if task.tests is not None:
        return f"kind {task.kind}: expected an answer, found tests; kind code has tests"
    if task.kind in KINDS and not (task.answer or "").strip():
        return f"kind {task.kind}: expected an answer, found none"
    if task.kind == "choice":
        return _bad_choice(task)
    return ""


def _bad_choice(task: Task) -> str:
    choices = task.meta.get("choices")
    allowed = LETTERS
    if choices is not None:
        if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(LETTERS):
            return f"meta.choices: expected 2 to {len(LETTERS)} options, found {choices!r:.60}"
        allowed = LETTERS[: len(choices)]
    answer = task.answer or ""
    if len(answer) != 1 or answer not in allowed:
        return f"kind choice: expected a letter from A to {allowed[-1]}, found {answer!r:.40}"
    return ""


def _bad_tests(tests: CodeTests) -> str:
    if not tests.cases:
        return "tests: expected at least one case, found none"
    limit = tests.time_limit_s
    if limit is not None and not (
        isinstance(limit, (int, float)) and not isinstance(limit, bool) and 0 < limit < math.inf
    ):
        return f"tests: expected a positive time_limit_s, found {limit!r}"
    for number, case in enumerate(tests.cases):
        if isinstance(case, StdinTest):
            texts = [case.stdin, case.stdout]
        elif isinstance(case, CallTest):
            texts = [case.function]
        else:
            texts = [case.code, *case.functions]
        if not all(isinstance(text, str) for text in [*texts, tests.prefix]):
            return f"tests: case {number}: expected text, found something else"
        if isinstance(case, CheckTest) and not case.functions:
            return f"tests: case {number}: expected functions of the program, found none"
    if not any(_expects_something(case) for case in tests.cases):
        return "tests: no case expects any output, so a program that does nothing would pass"
    return ""


def _expects_something(case: CodeTest) -> bool:
    if isinstance(case, StdinTest):
        return bool(case.stdout.strip())
    return True
