"""Every layout from samples as its data set writes them, through real files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from ttt_adapt.curriculum import (
    Task,
    Verifier,
)
from ttt_adapt.curriculum.importers.importing import LAYOUTS
from ttt_adapt.errors import CorpusError, TaskError
from ttt_adapt.testing import imported_task, imported_tasks, write_rows

GSM8K = {
    "question": "Weng earns $12 an hour. She worked 50 minutes. How much?",
    "answer": "12/60 = $<<12/60=0.2>>0.2 per minute.\n50 x 0.2 = $<<0.2*50=10>>10.\n#### 1,010",
}


MATH = {
    "problem": "What is $1/2 + 1/2$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"So $\boxed{x}$ is $\boxed{\frac{2}{2}}$.",
}


MATH500 = {
    "problem": "Convert $(0,3)$.",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}


SVAMP = {
    "Answer": 145.0,
    "Question": "How big is each group of bananas?",
    "Equation": "( 290.0 / 2.0 )",
    "Body": "There are 290 bananas in 2 groups",
    "Type": "Common-Division",
    "ID": "chal-777",
    "idx": 0,
}


BBH = {
    "task": "date_understanding",
    "id": 7,
    "input": "Today is 5/1. What is tomorrow?\nOptions:\n(A) 5/2\n(B) 5/3",
    "target": "(A)",
}


CHOICE = {"question": "Which is a fruit?", "choices": ["dog", "pear"], "answer": 1, "subject": "x"}


ARC = {
    "task_id": "007bbfb7",
    "train": [{"input": [[0, 7], [7, 7]], "output": [[7]]}],
    "test": [{"input": [[1]], "output": [[2, 3]]}, {"input": [[4]], "output": [[5]]}],
}


def test_gsm8k(tmp_path: Path) -> None:
    task = imported_task(tmp_path, GSM8K, "gsm8k-train.jsonl")
    assert task == Task(
        "gsm8k-train/1",
        "math",
        GSM8K["question"],
        "1010",
        source="gsm8k-train",
        licence="MIT",
        meta={"solution": GSM8K["answer"].rpartition("\n####")[0]},
    )


def test_math_by_its_solution_and_math500_by_its_answer(tmp_path: Path) -> None:
    task = imported_task(tmp_path, MATH)
    assert (task.kind, task.answer) == ("math", r"\frac{2}{2}")
    assert task.meta == {"type": "Algebra", "level": "Level 1", "solution": MATH["solution"]}
    short = imported_task(tmp_path, MATH500, "math500.jsonl")
    assert (short.id, short.answer) == ("math500/test/precalculus/807.json", MATH500["answer"])


def test_math_as_folders_of_json_files(tmp_path: Path) -> None:
    for number, folder in enumerate(("algebra", "geometry")):
        (tmp_path / "MATH" / folder).mkdir(parents=True)
        row = MATH | {"problem": f"Problem {number}?"}
        (tmp_path / "MATH" / folder / "1.json").write_text(json.dumps(row), encoding="utf-8")
    tasks = imported_tasks(str(tmp_path / "MATH"))
    assert [task.id for task in tasks] == ["MATH/algebra/1.json", "MATH/geometry/1.json"]


def test_svamp(tmp_path: Path) -> None:
    task = imported_task(tmp_path, SVAMP)
    assert task.prompt == "There are 290 bananas in 2 groups. How big is each group of bananas?"
    assert (task.id, task.answer) == ("set/chal-777", "145")
    assert imported_task(tmp_path, SVAMP | {"Answer": 0.5}).answer == "0.5"


def test_big_bench_hard(tmp_path: Path) -> None:
    task = imported_task(tmp_path, BBH)
    assert (task.id, task.kind, task.answer) == ("set/date_understanding/7", "choice", "A")
    assert task.meta["choices"] == ["5/2", "5/3"]
    assert task.meta["evaluation_only"] is True
    assert imported_task(tmp_path, BBH | {"target": "-50"}).kind == "math"
    assert imported_task(tmp_path, BBH | {"target": "yes"}).kind == "exact"
    assert imported_task(tmp_path, BBH | {"target": "(C)"}).kind == "exact", (
        "no such option is shown"
    )


def test_big_bench_hard_as_published(tmp_path: Path) -> None:
    examples = [{"input": f"not ( {n} ) is", "target": "True"} for n in range(3)]
    folder = tmp_path / "bbh"
    folder.mkdir()
    whole = {"canary": "BENCHMARK DATA", "examples": examples}
    (folder / "boolean_expressions.json").write_text(json.dumps(whole), encoding="utf-8")
    tasks = imported_tasks(str(folder))
    assert [task.id for task in tasks] == [f"bbh/boolean_expressions/{n}" for n in range(3)]
    assert tasks[0].meta["subtask"] == "boolean_expressions"


@pytest.mark.parametrize(
    "row",
    [
        CHOICE,
        CHOICE | {"answer": "B"},
        CHOICE | {"answer": "pear"},
        {"question": "Which is a fruit?", "options": ["dog", "pear"], "answer": "B"},
        {
            "question": "Which is a fruit?",
            "choices": {"text": ["dog", "pear"], "label": ["1", "2"]},
            "answerKey": "2",
        },
    ],
)
def test_multiple_choice(tmp_path: Path, row: dict[str, Any]) -> None:
    task = imported_task(tmp_path, row)
    assert task.prompt == "Which is a fruit?\n(A) dog\n(B) pear"
    assert (task.kind, task.answer, task.meta["choices"]) == ("choice", "B", ["dog", "pear"])


def test_arc_agi(tmp_path: Path, verifier: Verifier) -> None:
    tasks = imported_tasks(write_rows(tmp_path / "arc.jsonl", ARC))
    assert [task.id for task in tasks] == ["arc/007bbfb7/0", "arc/007bbfb7/1"]
    assert tasks[0].prompt == "Input:\n0 7\n7 7\nOutput:\n7\n\nInput:\n1\nOutput:"
    assert tasks[0].answer == "2 3"
    assert verifier.verify(tasks[0], "2 3").reward == 1.0
    (tmp_path / "arc").mkdir()
    pair = {"train": ARC["train"], "test": ARC["test"][:1]}
    (tmp_path / "arc" / "0a1b.json").write_text(json.dumps(pair), encoding="utf-8")
    assert imported_tasks(str(tmp_path / "arc"))[0].id == "arc/0a1b"


def test_any_table_by_its_columns(tmp_path: Path) -> None:
    table = pa.table({"q": ["1 + 1?", "2 + 2?"], "a": [2.0, 4.0], "key": ["x", "y"]})
    path = tmp_path / "sums.parquet"
    pyarrow.parquet.write_table(table, path)
    values: dict[str, Any] = {
        "importer": "columns",
        "prompt_column": "q",
        "answer_column": "a",
        "id_column": "key",
        "kind": "math",
        "name": "sums",
        "licence": "CC0-1.0",
        "prompt_template": "Compute: {prompt}\nAnswer:",
    }
    first, second = imported_tasks(str(path), **values)
    assert first == Task(
        "sums/x",
        "math",
        "Compute: 1 + 1?\nAnswer:",
        "2",
        source="sums",
        licence="CC0-1.0",
        meta={"problem": "1 + 1?"},
    )
    assert second.id == "sums/y"
    options = pa.table({"q": ["Which?"], "a": ["b"], "o": [["a", "b"]]})
    pyarrow.parquet.write_table(options, path)
    chosen = values | {"id_column": None, "choices_column": "o", "prompt_template": "{prompt}"}
    (choice,) = imported_tasks(str(path), **chosen)
    assert (choice.kind, choice.answer, choice.id) == ("choice", "B", "sums/1")


def test_hub_data_sets_from_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "school"
    folder.mkdir()
    rows = [GSM8K | {"question": f"Question {n}?"} for n in range(3)]
    write_rows(folder / "train.jsonl", *rows)
    write_rows(folder / "test.jsonl", GSM8K)
    tasks = imported_tasks(f"hub:{folder}", max_tasks=2)
    assert [task.id for task in tasks] == ["school/1", "school/2"]
    assert len(imported_tasks(f"hub:{folder}", split="test")) == 1
    table = {"importer": "columns", "prompt_column": "question", "kind": "exact"}
    assert imported_tasks(f"hub:{folder}", **table)[0].prompt == "Question 0?"
    with pytest.raises(CorpusError, match="cannot be opened: Bad split"):
        imported_tasks(f"hub:{folder}", split="none")


def test_a_folder_of_files_and_its_ids(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write_rows(tmp_path / f"{part}.jsonl", GSM8K, GSM8K)
    ids = [task.id for task in imported_tasks(str(tmp_path), name="gsm8k")]
    assert ids == ["gsm8k/a.jsonl:1", "gsm8k/a.jsonl:2", "gsm8k/b.jsonl:1", "gsm8k/b.jsonl:2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (GSM8K | {"answer": "####"}, "expected a number after ####"),
        (GSM8K | {"question": " "}, "column 'question': expected text, found ' '"),
        ({"problem": "p", "solution": "no box"}, "expected a final answer in"),
        (SVAMP | {"Answer": "x"}, "column 'Answer': expected a number"),
        (CHOICE | {"answer": 2}, "expected a letter, position or text of one option, found 2"),
        (CHOICE | {"choices": ["x"]}, "expected 2 to 26 options"),
        (ARC | {"train": []}, "column 'train': expected pairs of grids"),
        (ARC | {"test": [{"input": [[1], [2, 3]], "output": [[1]]}]}, "expected a grid of digits"),
    ],
)
def test_malformed_rows_fail_or_are_skipped(
    check_malformed: Callable[[Sequence[dict[str, Any]], dict[str, Any], str], None],
    row: dict[str, Any],
    reason: str,
) -> None:
    check_malformed((CHOICE, GSM8K, MATH, SVAMP, ARC), row, reason)


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"x": 1})
    with pytest.raises(
        TaskError, match="no importer fits the columns x; set importer to 'columns'"
    ):
        imported_tasks(path)
    with pytest.raises(TaskError, match="importer: expected one of auto, tasks, .*, found 'gsm'"):
        imported_tasks(path, importer="gsm")
    with pytest.raises(CorpusError, match="no such file"):
        imported_tasks(str(tmp_path / "none.jsonl"))
    with pytest.raises(CorpusError, match=r"expected tasks as .jsonl .*, found text"):
        (tmp_path / "a.txt").write_text("x", encoding="utf-8")
        imported_tasks(str(tmp_path / "a.txt"))
    twice = MATH500 | {"problem": "Another?"}
    with pytest.raises(TaskError, match="rows.jsonl:2: id .* is another task's already"):
        imported_tasks(write_rows(tmp_path / "rows.jsonl", MATH500, twice))
    with pytest.raises(TaskError, match="no task found"):
        imported_tasks(
            write_rows(tmp_path / "rows.jsonl", {"x": 1}), importer="gsm8k", on_error="skip"
        )
    (tmp_path / "bad.json").write_text("[1, {", encoding="utf-8")
    with pytest.raises(TaskError, match="bad.json: cannot be read"):
        imported_tasks(str(tmp_path / "bad.json"))


def test_every_layout_is_named_once() -> None:
    assert list(LAYOUTS) == [
        "verifiable-corpus",
        "humaneval",
        "mbpp",
        "gsm8k",
        "svamp",
        "math",
        "arc-agi",
        "big-bench-hard",
        "choice",
        "columns",
    ]
