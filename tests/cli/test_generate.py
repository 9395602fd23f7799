"""`ttt-adapt generate` through its entry point: any model, any way of giving the prompt."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ttt_adapt.cli.main import app
from ttt_adapt.models import generate, wrap_language_model
from ttt_adapt.testing import tiny_model, tiny_tokenizer, tiny_ttt_model


def invoke(*arguments: str | Path, text: str | None = None) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=text)


@pytest.fixture(scope="module")
def ttt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ttt")
    tiny_ttt_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def expected(prompt: str, model: Any = None, **options: Any) -> str:
    lm = wrap_language_model(model or tiny_ttt_model(), tiny_tokenizer(), name="tiny")
    return generate(lm, prompt, **{"max_new_tokens": 12, "temperature": 0.0, "seed": 0, **options})


def test_installed_command_continues_a_prompt(ttt_folder: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "ttt_adapt.cli.main", "generate", "alpha beta", "-m",
            str(ttt_folder), "-n", "12", "--json",
        ],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["continuation"] == expected("alpha beta")
    assert found["prompt"] == "alpha beta" and found["model"] == str(ttt_folder)
    assert {"fingerprint", "max_new_tokens", "temperature", "seed", "elapsed_s"} <= found.keys()


def test_prompt_from_argument_file_or_standard_input(ttt_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("gamma ", encoding="utf-8")
    common = ("-m", ttt_folder, "-n", "12")
    outputs = [
        invoke("gamma ", *common),
        invoke("--file", path, *common),
        invoke(*common, text="gamma "),
        invoke("-", *common, text="gamma "),
    ]
    assert [output.exit_code for output in outputs] == [0] * 4
    assert {output.stdout for output in outputs} == {expected("gamma ") + "\n"}


def test_sampling_follows_the_seed(ttt_folder: Path) -> None:
    common = ("word", "-m", ttt_folder, "-n", "12", "--temperature", "1.0", "--json")
    first, again, other = (
        json.loads(invoke(*common, "--seed", seed).stdout)["continuation"] for seed in "445"
    )
    assert first == again == expected("word", temperature=1.0, seed=4)
    assert first != other


def test_other_architectures(tmp_path: Path) -> None:
    model = tiny_model(architecture="gpt2")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found = json.loads(invoke("a", "-m", tmp_path, "-n", "5", "--json").stdout)
    assert found["continuation"] == expected("a", model, max_new_tokens=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "-m", "{tmp}/none"], "none: no such directory"),
        (["x", "-n", "0"], "max_new_tokens must be between 1 and 127"),
        (["x", "-n", "1000"], "max_new_tokens must be between 1 and 127"),
        (["x", "-t", "-1"], "temperature must be 0 or above"),
        (["x", "--file", "{tmp}/a"], "expected a text or --file, found both"),
        (["--file", "{tmp}/a"], "no such file"),
    ],
)
def test_one_line_and_exit_2(
    ttt_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    if "-m" not in filled:
        filled += ["-m", str(ttt_folder)]
    result = invoke(*filled)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("error:") == 1


def test_help_has_an_example_and_json() -> None:
    result = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Example: ttt-adapt generate" in result.output and "--json" in result.output
