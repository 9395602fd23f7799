"""Every command through its real entry point, on real files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.testing import sample_text

COMMAND = [sys.executable, "-m", "ttt_adapt.cli.main"]


def run(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_json(*arguments: str | Path, text: str | None = None) -> Any:
    done = run(*arguments, "--json", text=text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_installed_entry_point_is_this_command() -> None:
    installed = Path(sys.executable).with_name("ttt-adapt")
    done = subprocess.run(
        [installed, "--version"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("ttt-adapt ")


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from ttt_adapt.cli.main import app; "
        "print(sorted({'torch', 'faiss', 'transformers', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_index_select_predict(world: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    built = run_json(
        "index", "build", world / "corpus.jsonl", "-o", index, "--embedder", "hashing",
        "--chunk-size", "120",
    )  # fmt: skip
    assert built["num_documents"] == 60
    again = run_json(
        "index", "build", world / "corpus.jsonl", "-o", index, "--embedder", "hashing",
        "--chunk-size", "120",
    )  # fmt: skip
    assert again["content_hash"] == built["content_hash"]
    assert run_json("index", "info", index)["num_passages"] == built["num_passages"]
    query = sample_text(5, 30)
    found = run_json("index", "search", index, query, "-n", "3")["passages"]
    assert len(found) == 3
    picked = run_json("select", "--index", index, "-n", "4", text=query)
    assert [len(picked["sources"]), picked["method"]] == [4, "sift"]
    assert picked["sources"][0]["gain"] > 0
    predicted = run_json(
        "predict", query, "--index", index, "-m", world / "model", "-n", "4",
        "--set", "evaluation.steps=[0,2,4]", "--learning-rate", "0.01",
    )  # fmt: skip
    assert len(predicted["bits_per_byte"]) == 3
    continued = run_json(
        "predict", "return", "--index", index, "-m", world / "model", "-n", "2", "--generate",
        "--max-new-tokens", "4", "--set", "retrieval.max_overlap=1.0",
    )  # fmt: skip
    assert {"base", "adapted", "sources"} <= continued.keys()


def test_add_and_verify(world: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    common = ("--embedder", "hashing", "--chunk-size", "120")
    built = run_json("index", "build", world / "corpus.jsonl", "-o", index, *common)
    more = run_json("index", "add", index, world / "test.jsonl")
    assert more["num_documents"] == built["num_documents"] + 6
    checked = run_json("index", "verify", index, "--recall")
    assert checked["sound"] and checked["recall"]
    damaged = max((p for p in index.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    done = run("index", "verify", index)
    assert done.returncode == 2
    assert damaged.name in done.stderr and done.stderr.count("\n") == 1


def test_add_a_corpus_of_the_same_names(tmp_path: Path) -> None:
    index, corpora = tmp_path / "index", [tmp_path / name / "x.jsonl" for name in ("one", "two")]
    for corpus in corpora:
        corpus.parent.mkdir()
        rows = [{"text": f"text {number} of corpus {corpus.parent.name}"} for number in range(4)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = run_json("index", "build", corpora[0], "-o", index, "--embedder", "hashing")
    same = run_json("index", "add", index, corpora[0])
    assert (same["num_skipped_documents"], same["num_changed_documents"]) == (4, 0)
    done = run("index", "add", index, corpora[1], "--set", "corpus.max_documents=3")
    assert done.returncode == 0 and "again with an id_prefix" in " ".join(done.stdout.split())
    kept = run_json("index", "add", index, corpora[1], "--set", "corpus.max_documents=3")
    assert (kept["num_documents"], kept["num_changed_documents"]) == (built["num_documents"], 3)
    added = run_json("index", "add", index, corpora[1], "--id-prefix", "two/")
    assert added["num_documents"] == built["num_documents"] + 4
    refused = run("index", "add", index, corpora[1], "--set", "chunks.size=60")
    assert refused.returncode == 2 and "expected a setting of corpus" in refused.stderr


def test_eval_and_report(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arguments = (
        "eval", world / "test.jsonl", "--index", world / "index", "-o", out,
        "-m", world / "model", "--arms", "base,nearest,sift", "-n", "3", "--per-subset", "2",
        "--set", "evaluation.steps=[0,1,3]", "--set", "adaptation.precision=\"float32\"",
    )  # fmt: skip
    plan = run_json(*arguments, "--dry-run")
    assert plan["num_texts"] == 4 and not out.exists()
    summaries = run_json(*arguments)
    assert set(summaries) == {"base", "nearest", "sift"}
    shown = run(*arguments)
    assert shown.returncode == 0 and "sift" in shown.stdout and "of base" in shown.stdout
    written = run_json("report", out / "base", out / "sift", "-o", tmp_path / "report")
    assert all(Path(name).is_file() for name in written["files"])
    assert Path(written["files"][0]).suffix == ".html"


def test_interrupted_eval_exits_130_and_keeps_what_was_done(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arguments = (
        "eval", world / "test.jsonl", "--index", world / "index", "-o", out,
        "-m", world / "model", "--arms", "sift", "-n", "20", "--set",
        "evaluation.steps=[0,20]", "--set", "adaptation.epochs=50",
    )  # fmt: skip
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    ledger = out / "sift" / "ledger.sqlite"
    while not ledger.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in stderr and "Traceback" not in stderr
    assert ledger.exists()


def test_pretrain(world: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        'name = "tiny"\nvocab_size = 300\nhidden_size = 32\nintermediate_size = 48\n'
        "num_layers = 1\nnum_heads = 2\nmax_length = 32\nnum_tokens = 1024\nbatch_size = 4\n"
        '[[sources]]\npath = "corpus.jsonl"\n'
    )
    out = tmp_path / "model"
    arguments = ("pretrain", "-c", recipe, "-o", out, "--data-root", world)
    assert run_json(*arguments, "--dry-run")["num_steps"] == 8
    assert not out.exists()
    assert run_json(*arguments)["finished"]
    assert (out / "model.safetensors").is_file()


def test_doctor() -> None:
    found = run_json("doctor")
    assert found["versions"]["torch"].startswith("2.")
    assert found["machine"]["processors"] >= 1


@pytest.mark.parametrize(
    "command",
    ["index build", "index info", "index search", "index verify", "index add", "select",
     "predict", "eval", "report", "pretrain", "demo", "doctor"],
)  # fmt: skip
def test_help_has_an_example_and_json(command: str) -> None:
    from typer.testing import CliRunner

    from ttt_adapt.cli.main import app

    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: ttt-adapt {command}" in result.output
    assert "--json" in result.output
