"""Tasks as values, and in files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttt_adapt.corpus import ReadProblems
from ttt_adapt.curriculum import (
    CallTest,
    CheckTest,
    CodeTests,
    StdinTest,
    Task,
    read_tasks,
    write_tasks,
)
from ttt_adapt.curriculum.tasks import from_json, to_json
from ttt_adapt.errors import CorpusError, TaskError

MATH = Task("a/1", "math", "1 + 1?", "2", source="a", licence="MIT", meta={"level": 1})
CODE = Task(
    "b/1",
    "code",
    "Echo é.",
    tests=CodeTests(
        (
            StdinTest("1\n", "1\n"),
            CallTest("f", (1, [None, {"x": 2.5}]), {"y": [True]}, {"key": "é"}),
            CheckTest("assert f(1)", ("f",)),
        ),
        prefix="import math\n",
        time_limit_s=2.0,
    ),
)
CHOICE = Task("c/1", "choice", "Which?", "B", meta={"choices": ["one", "two"]})
OWN = Task("d/1", "poem", "Write one.")
ALL = [MATH, CODE, CHOICE, OWN]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(TEXT, st.sampled_from(["math", "exact", "regex", "grid", "own"]), TEXT, TEXT, st.text())
def test_a_task_survives_json(one: str, kind: str, two: str, three: str, value: str) -> None:
    task = Task(one, kind, two, three, meta={"value": value})
    assert from_json(json.loads(json.dumps(to_json(task)))) == task


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst", "folder/t.jsonl"])
def test_files_hold_tasks(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert write_tasks(path, iter(ALL)) == 4
    found = ReadProblems()
    assert list(read_tasks(path, problems=found)) == ALL
    assert (found.num_documents, found.num_files, found.num_skipped) == (4, 1, 0)
    assert list(read_tasks(path.parent)) == ALL
    assert list(path.parent.iterdir()) == [path]


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_tasks(path, ALL)
    before = path.read_bytes()
    with pytest.raises(TaskError, match=r"two tasks have the id 'a/1'"):
        write_tasks(path, [MATH, MATH])
    with pytest.raises(TaskError, match=r"task 'n' cannot be written as JSON"):
        write_tasks(path, [Task("n", "math", "p", "1", meta={"x": float("nan")})])
    with pytest.raises(TaskError, match=r"task 's' cannot be written as JSON"):
        write_tasks(path, [Task("s", "math", "p", "1", meta={"x": "\ud800"})])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TaskError, match=r"expected a name ending in .jsonl or .jsonl.zst"):
        write_tasks(tmp_path / "t.json", ALL)


BAD_LINES = [
    ("{", "not valid JSON"),
    ("[]", "expected a JSON object, found a list"),
    ('{"id": "x", "kind": "math"}', "no prompt; found: id, kind"),
    ('{"id": "x", "kind": "math", "prompt": "p"}', "expected an answer, found none"),
    ('{"id": "x", "kind": "math", "prompt": "p", "answer": 5}', "answer: expected text, found int"),
    ('{"id": "x", "kind": "math", "prompt": "p", "answer": "5", "extra": 1}', "found 'extra'"),
    ('{"id": "a/1", "kind": "math", "prompt": "p", "answer": "5"}', "another task's already"),
    ('{"id": "x", "kind": "code", "prompt": "p"}', "expected tests, found none"),
    ('{"id": "x", "kind": "code", "prompt": "p", "tests": [1]}', "tests: expected cases"),
    ('{"id": "x", "kind": "code", "prompt": "p", "tests": {"cases": [{"x": 1}]}}', "tests: expect"),
    ('{"id": "x", "kind": "code", "prompt": "p", "tests": {"cases": [], "x": 1}}', "unknown x"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_malformed_line_is_located(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps(to_json(MATH))
    path.write_text(f"{good}\n\n{line}\n{json.dumps(to_json(CHOICE))}\n", encoding="utf-8")
    with pytest.raises(
        TaskError, match=r"t.jsonl:3: .*mend it, or set on_error to 'skip'"
    ) as error:
        list(read_tasks(path))
    assert reason in str(error.value)
    found = ReadProblems()
    assert list(read_tasks(path, on_error="skip", problems=found)) == [MATH, CHOICE]
    assert found.problems[0].location == "t.jsonl:3"
    assert reason in found.problems[0].reason


def test_files_that_hold_no_task(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("{\n", encoding="utf-8")
    with pytest.raises(TaskError, match="no task found.*first: t.jsonl:1"):
        list(read_tasks(path, on_error="skip"))
    with pytest.raises(CorpusError, match="no such file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="on_error: expected 'fail' or 'skip', found 'ignore'"):
        read_tasks(path, on_error="ignore")  # type: ignore[arg-type]


def test_a_truncated_file_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    many = [Task(f"t/{n}", "math", f"{n}?" * 50, str(n)) for n in range(2000)]
    write_tasks(path, many)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TaskError, match="cannot be read on"):
        list(read_tasks(path))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"id": " "}, "id: expected text, found none"),
        ({"kind": ""}, "kind: expected text, found none"),
        ({"prompt": "\ud800"}, "prompt: an unpaired surrogate"),
        ({"answer": None}, "expected an answer, found none"),
        ({"tests": CODE.tests}, "expected an answer, found tests"),
        ({"meta": [1]}, "meta: expected an object, found list"),
        ({"kind": "choice", "answer": "b"}, "a letter from A to Z, found 'b'"),
        (
            {"kind": "choice", "answer": "C", "meta": {"choices": ["a", "b"]}},
            "a letter from A to B, found 'C'",
        ),
        ({"kind": "choice", "answer": "A", "meta": {"choices": ["a"]}}, "expected 2 to 26 options"),
        ({"kind": "code", "answer": None, "tests": CodeTests(())}, "at least one case"),
        (
            {"kind": "code", "answer": None, "tests": CodeTests((StdinTest("1", " \n"),))},
            "a program that does nothing would pass",
        ),
        (
            {"kind": "code", "answer": None, "tests": CodeTests((StdinTest("", "1"),), "", -1.0)},
            "expected a positive time_limit_s, found -1.0",
        ),
        (
            {"kind": "code", "answer": None, "tests": CodeTests((CheckTest("x", ()),))},
            "expected functions of the program, found none",
        ),
        (
            {"kind": "code", "answer": None, "tests": CodeTests((StdinTest(1, "1"),))},  # type: ignore[arg-type]
            "case 0: expected text",
        ),
    ],
)
def test_a_task_that_is_none(values: dict[str, Any], reason: str) -> None:
    sound: dict[str, Any] = {"id": "t", "kind": "math", "prompt": "p", "answer": "1"}
    with pytest.raises(TaskError) as error:
        Task(**(sound | values))
    assert reason in str(error.value)


def test_the_problem_is_what_is_compared() -> None:
    assert MATH.problem == "1 + 1?"
    assert Task("t", "math", "Solve: 1 + 1?", "2", meta={"problem": "1 + 1?"}).problem == "1 + 1?"
