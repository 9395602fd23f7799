"""Layouts of programming tasks, from samples as their data sets write them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.curriculum import (
    CallTest,
    CheckTest,
    StdinTest,
    Verifier,
    write_tasks,
)
from ttt_adapt.testing import imported_task, imported_tasks, write_rows

HUMANEVAL = {
    "task_id": "HumanEval/32",
    "prompt": "import math\n\n\ndef poly(xs: list, x: float):\n    return sum(c * math.pow(x, i) for "
    'i, c in enumerate(xs))\n\n\ndef find_zero(xs: list):\n    """ A zero of poly.\n    """\n',
    "entry_point": "find_zero",
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    import copy\n"
    "    for a in range(1, 4):\n        xs = [a, 2]\n"
    "        assert math.fabs(poly(xs, candidate(copy.deepcopy(xs)))) < 1e-4\n",
}


MBPP = {
    "task_id": 2,
    "text": "Write a function to find the similar elements from the given two tuple lists.",
    "code": "def similar_elements(test_tup1, test_tup2):\n"
    "  res = tuple(set(test_tup1) & set(test_tup2))\n  return (res) ",
    "test_list": [
        "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
        "assert set(similar_elements((1, 2), (2, 3))) == {2}",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}


CORPUS: list[dict[str, Any]] = [
    {
        "kind": "math",
        "dataset": "dapo_math",
        "description": "1+1?",
        "problem": "1+1?",
        "answer": "2",
        "tests": None,
    },
    {
        "kind": "verifier",
        "dataset": "webinstruct",
        "description": "Capital of France?",
        "problem": "Capital of France?",
        "answer": "Paris",
        "tests": None,
    },
    {
        "kind": "code",
        "dataset": "taco",
        "description": "Double it.",
        "problem": "Double it.\nInput\n1",
        "answer": None,
        "tests": json.dumps(
            {
                "inputs": ["1\n", ["2", "3"]],
                "outputs": ["2\n", "4"],
                "testtype": "stdin",
                "fn_name": "",
                "time_limit": 1.0,
            }
        ),
    },
    {
        "kind": "code",
        "dataset": "livecodebench",
        "description": "Add.",
        "problem": "Add.",
        "answer": None,
        "tests": json.dumps(
            {
                "inputs": ["[1, 2]\n3", [[1], 2], "nums = [3, 3], target = 6", {"a": 1}],
                "outputs": ["[0]", 5, "[0, 1]", "None"],
                "testtype": "functional",
                "fn_name": "add",
                "context": "from typing import List",
            }
        ),
    },
    {
        "kind": "code",
        "dataset": "mbppplus",
        "description": "Echo.",
        "problem": "Echo.",
        "answer": None,
        "tests": {
            "inputs": ["import math\nassert echo(math.pi) == math.pi"],
            "outputs": [""],
            "testtype": "code",
            "fn_name": "",
        },
    },
]


def test_humaneval(tmp_path: Path, verifier: Verifier) -> None:
    task = imported_task(tmp_path, HUMANEVAL)
    assert (task.id, task.kind) == ("set/32", "code")
    assert task.tests is not None
    (case,) = task.tests.cases
    assert isinstance(case, CheckTest)
    assert case.functions == ("find_zero",), "poly is the prompt's, not the program's"
    assert verifier.verify(task, str(HUMANEVAL["canonical_solution"])).reward == 1.0
    assert verifier.verify(task, "    return 5.0\n").reward == 0.0


def test_mbpp(tmp_path: Path, verifier: Verifier) -> None:
    task = imported_task(tmp_path, MBPP)
    assert task.id == "set/2"
    assert task.problem == MBPP["text"]
    assert task.prompt.endswith("```python\ndef similar_elements(test_tup1, test_tup2):\n```")
    assert task.tests is not None
    assert [c.functions for c in task.tests.cases if isinstance(c, CheckTest)] == [
        ("similar_elements",)
    ] * 2
    assert verifier.verify(task, f"```python\n{MBPP['code']}\n```").reward == 1.0
    no_code = {key: value for key, value in MBPP.items() if key != "code"}
    bare = imported_task(tmp_path, no_code)
    assert bare.tests == task.tests
    assert bare.prompt == MBPP["text"]


def test_the_verifiable_corpus(tmp_path: Path, verifier: Verifier) -> None:
    math, web, stdin, functional, code = imported_tasks(
        write_rows(tmp_path / "corpus.jsonl", *CORPUS)
    )
    assert (math.kind, web.kind, stdin.kind) == ("math", "exact", "code")
    assert (web.answer, math.meta) == ("Paris", {"dataset": "dapo_math"})
    assert stdin.problem == "Double it."
    assert stdin.tests is not None
    assert stdin.tests.cases == (StdinTest("1\n", "2\n"), StdinTest("2\n3", "4"))
    assert stdin.tests.time_limit_s == 1.0
    assert functional.tests is not None
    assert functional.tests.cases == (
        CallTest("add", ([1, 2], 3), [0]),
        CallTest("add", ([1], 2), 5),
        CallTest("add", (), [0, 1], {"nums": [3, 3], "target": 6}),
        CallTest("add", (), None, {"a": 1}),
    )
    assert functional.tests.prefix == "from typing import List"
    assert code.tests is not None
    assert code.tests.cases[0] == CheckTest(CORPUS[4]["tests"]["inputs"][0], ("echo",))
    assert verifier.verify(code, "```\ndef echo(x): return x\n```").reward == 1.0
    program = "```\nfor line in open(0): print(2 * int(line)); break\n```"
    assert verifier.verify(stdin, program).reward == 1.0


def test_files_of_this_project(tmp_path: Path) -> None:
    tasks = imported_tasks(write_rows(tmp_path / "corpus.jsonl", *CORPUS))
    write_tasks(tmp_path / "own.jsonl.zst", tasks)
    assert imported_tasks(str(tmp_path / "own.jsonl.zst")) == tasks


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (HUMANEVAL | {"test": "def check(:"}, "a test is no Python"),
        (MBPP | {"test_list": []}, "expected assertions, found none"),
        (MBPP | {"test_list": ["assert 1 == 1"]}, "asks nothing of the program"),
        (MBPP | {"test_list": "assert"}, "expected a list of texts"),
        (CORPUS[0] | {"kind": "poem"}, "expected one of math, verifier, exact, code, found 'poem'"),
        (CORPUS[2] | {"tests": "{"}, "column 'tests': expected JSON"),
        (CORPUS[2] | {"tests": None}, "column 'tests': expected an object"),
        (
            CORPUS[2] | {"tests": {"inputs": ["1"], "outputs": []}},
            "expected as many inputs as outputs",
        ),
        (
            CORPUS[2] | {"tests": {"inputs": ["1"], "outputs": ["1"], "testtype": "x"}},
            "expected stdin, functional or code, found 'x'",
        ),
        (
            CORPUS[2] | {"tests": {"inputs": ["1"], "outputs": [" "], "testtype": "stdin"}},
            "a program that does nothing would pass",
        ),
        (
            CORPUS[3]
            | {
                "tests": {
                    "inputs": ["import os"],
                    "outputs": ["1"],
                    "testtype": "functional",
                    "fn_name": "f",
                }
            },
            "expected a function's arguments, found 'import os'",
        ),
    ],
)
def test_malformed_rows_fail_or_are_skipped(
    check_malformed: Callable[[Sequence[dict[str, Any]], dict[str, Any], str], None],
    row: dict[str, Any],
    reason: str,
) -> None:
    check_malformed((HUMANEVAL, MBPP, CORPUS[0]), row, reason)


def test_what_an_assertion_takes_from_the_program(tmp_path: Path) -> None:
    rows = [
        ("def sum(a, b): return a", "assert sum(10, 15) == 10", ("sum",), ""),
        ("import sys\ndef size(x): return sys.getsizeof(x)",
         "assert size((1,)) == sys.getsizeof((1,))", ("size",), "import sys\n"),
        ("import numpy as np\ndef f(): return np.eye(2)", "assert (f() == np.eye(2)).all()", ("f",),
         "import numpy as np\n"),
        ("class P:\n pass\ndef g(p): return 1", "assert g(P()) == 1", ("g", "P"), ""),
        ("", "assert math.isclose(h(1), 1)", ("h",), "import math\n"),
        ("def check(n): return n", "assert [check(n) for n in range(2)] == [0, 1]", ("check",), ""),
    ]  # fmt: skip
    for code, assertion, functions, imports in rows:
        task = imported_task(tmp_path, MBPP | {"code": code, "test_list": [assertion]})
        assert task.tests is not None
        assert task.tests.cases == (CheckTest(imports + assertion, functions),)
