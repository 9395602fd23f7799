"""`ttt-adapt curriculum`, through its real entry point: import to comparison, resume, mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ttt_adapt import testing
from ttt_adapt.cli.main import app
from ttt_adapt.curriculum import read_tasks
from ttt_adapt.curriculum.demonstration import character_model, draw_tasks
from ttt_adapt.curriculum.demonstration.characters import save_character_model
from ttt_adapt.curriculum.task_files import write_tasks

COMMAND = [sys.executable, "-m", "ttt_adapt.cli.main", "curriculum"]
TINY = [
    "--set", "num_steps=2", "--set", "prompts_per_step=2", "--set", "num_generations=2",
    "--set", "max_completion_tokens=3", "--set", "device=\"cpu\"",
]  # fmt: skip
COMPARISON = [
    "--set", "training.num_steps=2", "--set", "training.prompts_per_step=2",
    "--set", "training.num_generations=2", "--set", "training.max_completion_tokens=3",
    "--set", "training.device=\"cpu\"", "--set", "selection.device=\"cpu\"",
    "--set", "sampling.num_samples=2", "--set", "sampling.max_new_tokens=3",
    "--set", "num_resamples=20", "-n", "4", "--seeds", "0", "--arms", "base,nearest",
]  # fmt: skip


def invoke(*arguments: object, code: int = 0) -> tuple[str, str]:
    found, stdout, stderr = testing.invoke("curriculum", *arguments)
    assert found == code, stderr
    return stdout, stderr


def invoke_json(*arguments: object) -> Any:
    return json.loads(invoke(*arguments, "--json")[0])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a corpus in its own layout, targets, and tasks of another kind."""
    folder = tmp_path_factory.mktemp("place")
    save_character_model(character_model(0), folder / "model")
    targets = draw_tasks({"rotl": 2, "sort": 1}, 0)
    corpus = [*draw_tasks({"rotl": 8, "swap": 8}, 1, without=targets), targets[0]]
    rows = [{"question": task.prompt, "reply": task.answer} for task in corpus]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text + text.splitlines()[0] + "\n")
    write_tasks(folder / "targets.jsonl", targets)
    write_tasks(folder / "others.jsonl", draw_tasks({"flip": 1}, 2))
    return folder


@pytest.fixture(scope="module")
def clean(place: Path) -> Path:
    """The corpus imported and decontaminated, by the commands."""
    arguments = (
        "import", place / "rows.jsonl", "-o", place / "corpus.jsonl.zst", "--importer", "columns",
        "--set", "prompt_column=question", "--set", "answer_column=reply",
    )  # fmt: skip
    assert invoke_json(*arguments)["num_tasks"] == 18
    assert invoke_json(*arguments)["is_new"] is False
    cleaning = (
        "decontaminate", place / "corpus.jsonl.zst", "-t", place / "targets.jsonl", "-o",
        place / "clean",
    )  # fmt: skip
    plan = invoke_json(*cleaning, "--dry-run")
    assert plan["num_tasks"] == 18 and not (place / "clean").exists()
    made = invoke_json(*cleaning)
    assert (made["num_tasks"], made["num_duplicates"], made["num_contaminated"]) == (16, 1, 1)
    assert "already there" in invoke(*cleaning)[1]
    assert (place / "clean" / "decontamination.txt").is_file()
    return place / "clean" / "tasks.jsonl.zst"


def test_a_changed_result_is_made_again(place: Path, clean: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.jsonl"
    assert invoke_json("import", clean, "-o", out)["num_tasks"] == 16
    out.write_text("")
    assert invoke_json("import", clean, "-o", out)["is_new"] is True
    assert len(list(read_tasks(out))) == 16


def test_select_train_eval(place: Path, clean: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    selecting = ("select", clean, "-t", place / "targets.jsonl", "-m", place / "model",
                 "-n", "4", "--device", "cpu", "-o", chosen)  # fmt: skip
    assert invoke_json(*selecting, "--dry-run")["texts_to_embed"] == 19
    assert not chosen.exists()
    report = invoke_json(*selecting)
    assert (report["num_selected"], report["method"]) == (4, "sift")
    assert invoke_json(*selecting, "--method", "nearest")["method"] == "nearest"
    training = ("train", chosen, "-m", place / "model", "-o", tmp_path / "trained", *TINY)
    plan = invoke_json(*training, "--dry-run")
    assert (plan["num_steps"], plan["num_rollouts"]) == (2, 8)
    assert plan["estimated_s_at_most"] >= 0 and not (tmp_path / "trained").exists()
    result = invoke_json(*training)
    assert (result["num_steps"], result["num_rollouts"]) == (2, 8)
    assert invoke_json(*training) == result
    attempting = ("eval", place / "targets.jsonl", "-m", result["model"], "-o", tmp_path / "eval",
                  "--num-samples", "2", "--max-new-tokens", "3", "--device", "cpu")  # fmt: skip
    assert invoke_json(*attempting, "--dry-run")["num_completions"] == 6
    found = invoke_json(*attempting)
    assert found["rates"]["num_completions"] == 6
    assert set(found["by_source"]) == {"rotl", "sort"}
    before = (tmp_path / "eval" / "attempts.jsonl").read_bytes()
    printed = invoke(*attempting)
    assert "pass@2" in printed[0]
    assert (tmp_path / "eval" / "attempts.jsonl").read_bytes() == before


def test_tasks_are_chosen_anew_while_training(place: Path, clean: Path, tmp_path: Path) -> None:
    training = ("train", clean, "-m", place / "model", "-o", tmp_path / "trained", *TINY,
                "--corpus", clean, "-t", place / "targets.jsonl",
                "--set", "reselect_every=1", "--set", "band=[0.0, 1.0]")  # fmt: skip
    done = subprocess.run(
        [*COMMAND, *map(str, training), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["num_steps"] == 2
    assert "Writing" not in done.stderr  # transformers' own progress bar
    known = {task.id for task in read_tasks(clean)}
    chosen = list(read_tasks(tmp_path / "trained" / "curricula" / "step-00000001.jsonl"))
    assert chosen and {task.id for task in chosen} <= known


def test_compare_and_report(place: Path, clean: Path, tmp_path: Path) -> None:
    out = tmp_path / "comparison"
    arguments = ("compare", clean, "-t", place / "targets.jsonl", "--others",
                 place / "others.jsonl", "-m", place / "model", "-o", out, *COMPARISON)  # fmt: skip
    plan = invoke_json(*arguments, "--dry-run")
    assert (plan["num_runs"], plan["rollouts_per_run"]) == (2, 8) and not out.exists()
    found = invoke_json(*arguments)
    assert [arm["name"] for arm in found["arms"]] == ["base", "nearest"]
    assert found["num_evaluation"] == 3 and found["num_others"] == 1
    table, said = invoke(*arguments)
    assert "nearest" in table and "Best by" in said
    page = Path(testing.invoke_json("report", out)["files"][0])
    assert page == out / "report" / "report.html" and "<svg" in page.read_text()


def test_ctrl_c_keeps_what_is_done(place: Path, clean: Path, tmp_path: Path) -> None:
    out = tmp_path / "comparison"
    arguments = [
        *COMMAND, "compare", clean, "-t", place / "targets.jsonl", "-m", place / "model", "-o", out,
        *COMPARISON, "--set", "training.num_steps=4000", "--set", "training.save_every=4000",
        "--workers", "1",
    ]  # fmt: skip
    process = subprocess.Popen(
        list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    history = out / "runs/nearest/seed-0/training/history.jsonl"
    deadline = time.monotonic() + 240
    while not (history.is_file() and history.read_text().count("\n") > 1):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "the same command continues" in said
    assert (out / "runs/base/seed-0/result.json").is_file()
    # Checkpoints are every 4000 steps: this one is the stop's own.
    assert list((out / "runs/nearest/seed-0/training/checkpoints").iterdir())


def test_demonstration_in_small(tmp_path: Path) -> None:
    small = [
        "-o", tmp_path, "--workers", "0", "--arms", "base,sift", "--seeds", "0",
        "--set", 'scenarios=["mixed"]', "--set", "num_corpus=60", "--set", "num_select=8",
        "--set", "num_evaluation=6", "--set", "num_other=1", "--set", "num_steps=1",
        "--set", "prompts_per_step=2", "--set", "num_generations=2", "--set", "num_samples=2",
        "--set", "pretraining.num_steps=2",
    ]  # fmt: skip
    plan = invoke_json("demo", *small, "--dry-run")
    assert (plan["num_training_runs"], plan["rollouts_per_run"]) == (1, {"mixed": 4})
    found = invoke_json("demo", *small)
    assert list(found["comparisons"]) == ["mixed"]
    assert Path(found["reports"]["mixed"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["import", "{tmp}/none.jsonl", "-o", "{tmp}/o.jsonl"], "none.jsonl"),
        (["import", "{place}/rows.jsonl", "-o", "{tmp}/o.jsonl"], "importer"),
        (["import", "{place}/targets.jsonl", "-o", "{tmp}/o.txt"], ".jsonl.zst"),
        (["decontaminate", "{place}/targets.jsonl", "-t", "{tmp}/none", "-o", "{tmp}/o"], "none"),
        (["select", "{place}/targets.jsonl", "-t", "{place}/others.jsonl", "-o", "{tmp}/o",
          "--method", "sfit"], "method"),
        (["select", "{place}/targets.jsonl", "-t", "{place}/others.jsonl", "-o", "{tmp}/o",
          "-m", "{tmp}/no-model"], "no-model"),
        (["train", "{tmp}/none", "-o", "{tmp}/o"], "none"),
        (["train", "{place}/targets.jsonl", "-o", "{tmp}/o", "-c", "no_such_recipe"],
         "no_such_recipe"),
        (["train", "{place}/targets.jsonl", "-o", "{tmp}/o", "--set", "num_stepz=1"],
         "did you mean num_steps"),
        (["eval", "{place}/targets.jsonl", "-m", "{place}/model", "-o", "{tmp}/o",
          "--num-samples", "0"], "num_samples"),
        (["compare", "{place}/targets.jsonl", "-t", "{place}/targets.jsonl", "-o", "{tmp}/o",
          "-m", "{place}/model"], "decontaminate"),
        (["compare", "{place}/targets.jsonl", "-t", "{place}/others.jsonl", "-o", "{tmp}/o",
          "--arms", "best"], "best"),
        (["compare", "{place}/targets.jsonl", "-t", "{place}/others.jsonl", "-o", "{tmp}/o",
          "--seeds", "one"], "whole numbers"),
        (["demo", "-o", "{tmp}/o", "--set", 'scenarios=["both"]'], "both"),
    ],
)  # fmt: skip
def test_one_line_and_exit_2(
    place: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    filled = [argument.format(tmp=tmp_path, place=place) for argument in arguments]
    said = invoke(*filled, code=2)[1]
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and expected in lines[0]
    assert "Traceback" not in said
    assert not list(tmp_path.glob("o*"))


def test_every_command_has_an_example() -> None:
    names = ["import", "decontaminate", "select", "train", "eval", "compare", "demo"]
    for name in names:
        shown = CliRunner().invoke(app, ["curriculum", name, "--help"])
        assert shown.exit_code == 0 and f"Example: ttt-adapt curriculum {name}" in " ".join(
            shown.stdout.split()
        )
