"""A user's mistakes: one clear line on standard error, exit code 2, nothing half-written."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttt_adapt.cli.main import app


def invoke(*arguments: str | Path, text: bytes | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["index", "build", "{tmp}/none.jsonl", "-o", "{tmp}/i"], "none.jsonl"),
        (["index", "build", "{world}/corpus.jsonl", "-o", "{tmp}/i", "--format", "xml"], "format"),
        (["index", "build", "{world}/corpus.jsonl", "-o", "{tmp}/i", "--text-column", "body",
          "--embedder", "hashing"], "body"),
        (["index", "build", "{world}/corpus.jsonl", "-o", "{tmp}/i", "--factory", "Flaat",
          "--embedder", "hashing"], "Flaat"),
        (["index", "build", "{world}/corpus.jsonl", "-o", "{tmp}/i", "--chunk-overlap", "5000"],
         "overlap"),
        (["index", "info", "{tmp}/nothing"], "nothing"),
        (["index", "verify", "{tmp}/nothing"], "nothing"),
        (["index", "search", "{world}/index", ""], "empty"),
        (["select", "x", "--index", "{tmp}/nothing"], "nothing"),
        (["select", "x", "--index", "{world}/index", "--selector", "sfit"], "selection.method"),
        (["select", "x", "--index", "{world}/index", "--noise-var", "-1"], "noise_var"),
        (["select", "x", "--index", "{world}/index", "--set", "selection.nois_var=1"],
         "did you mean noise_var"),
        (["select", "x", "--index", "{world}/index", "--set", "novalue"], "key=value"),
        (["select", "x", "--index", "{world}/index", "--config", "no_such_recipe"],
         "no_such_recipe"),
        (["select", "x", "--index", "{world}/index", "--config", "{tmp}/no.toml"], "no.toml"),
        (["select", "--file", "{tmp}/no.txt", "--index", "{world}/index"], "no.txt"),
        (["predict", "some text", "--index", "{world}/index", "-m", "{tmp}/no-model"], "no-model"),
        (["predict", "a", "--file", "{world}/corpus.jsonl", "--index", "{world}/index"], "both"),
        (["eval", "{tmp}/none.jsonl", "--index", "{world}/index", "-m", "{world}/model", "-o",
          "{tmp}/o"], "none.jsonl"),
        (["eval", "--index", "{world}/index", "-m", "{world}/model", "-o", "{tmp}/o"], "data"),
        (["report", "{tmp}/nothing", "-o", "{tmp}/o"], "nothing"),
        (["pretrain", "-c", "pretrain_llama_7m", "-o", "{tmp}/o", "--data-root", "{tmp}",
          "--dry-run"], "--data-root"),
    ],
)  # fmt: skip
def test_one_line_and_exit_2(
    world: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    filled = [argument.format(tmp=tmp_path, world=world) for argument in arguments]
    code, stderr = invoke(*filled)
    assert code == 2, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and expected in lines[0]
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("i")) and not list(tmp_path.glob("o"))


def test_text_that_is_no_utf8(world: Path) -> None:
    code, stderr = invoke("select", "--index", world / "index", text=b"caf\xe9")
    assert code == 2
    assert "expected UTF-8 text, found byte 0xe9 at 3" in stderr


def test_unknown_option_is_a_usage_error() -> None:
    code, stderr = invoke("select", "x", "--indx", "y")
    assert code == 2 and "--indx" in stderr


def test_malformed_lines_fail_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good text"}\n{"text": \n{"text": "more text"}\n')
    build = ("index", "build", path, "-o", tmp_path / "i", "--embedder", "hashing")
    code, stderr = invoke(*build)
    assert code == 2 and "bad.jsonl:2" in stderr
    code, stderr = invoke(*build, "--on-error", "skip")
    assert code == 0 and "bad.jsonl:2" in stderr
