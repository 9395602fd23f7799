"""`ttt-adapt convert` as a process of its own, and a user's mistakes."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttt_adapt import testing
from ttt_adapt.cli.main import app
from ttt_adapt.config import CorpusSettings, load_settings, make_settings, to_toml
from ttt_adapt.configs import config_path
from ttt_adapt.conversion_settings import ConvertSettings
from ttt_adapt.errors import SettingsError
from ttt_adapt.testing import sample_text, tiny_attention_model, tiny_tokenizer

COMMAND = [sys.executable, "-m", "ttt_adapt.cli.main", "convert"]
FEW = (
    "--set", "distillation.max_length=24", "--set", "distillation.batch_size=2",
    "--transfer-steps", "6", "--lora-steps", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``text.txt`` and ``train.txt``."""
    folder = tmp_path_factory.mktemp("convert")
    tiny_attention_model("qwen3").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(sample_text(1, 60))
    (folder / "train.txt").write_text(sample_text(2, 400))
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


invoke, invoke_json = partial(testing.invoke, "convert"), partial(testing.invoke_json, "convert")


def test_the_installed_command_distils_and_saves(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        place / "model", "--mode", "distilled", "--layers", "0,2", "--text", place / "text.txt",
        "--train", place / "train.txt", "-o", out, "--json", *FEW,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layers"] == [0, 2]
    assert 0 < found["num_new_parameters"] < found["num_parameters"]
    assert found["num_train_tokens"] == 10 * 2 * 24
    stages = [found[name] for name in ("before", "converted", "transferred", "distilled")]
    assert len({stage["perplexity"] for stage in stages}) == 4
    assert {stage["num_tokens"] for stage in stages} == {stages[0]["num_tokens"]}
    for layer in found["per_layer"]:
        assert layer["error_transferred"] < layer["error"]
        assert layer["transferred"]["perplexity"] != layer["converted"]["perplexity"]
    assert found == json.loads((out / "conversion.json").read_text())
    settings = load_settings(ConvertSettings, out / "conversion.toml")
    assert settings.conversion.layers == "0,2"
    # What was saved is what was measured: scored again it gives the same perplexity.
    assert rescored(out, place) == pytest.approx(stages[-1]["perplexity"], rel=1e-4)


def rescored(folder: Path, place: Path) -> float:
    import math

    from ttt_adapt.config import ModelSettings
    from ttt_adapt.evaluation import bits_per_byte
    from ttt_adapt.models import load_language_model

    lm = load_language_model(ModelSettings(name=str(folder), device="cpu"))
    total = bits_per_byte(lm.model, lm.tokenizer, [(place / "text.txt").read_text()]).total
    return math.exp(total.nats / total.num_tokens)


def test_pure_reports_each_layer_and_needs_no_training(place: Path, tmp_path: Path) -> None:
    common = (place / "model", "--text", place / "text.txt", "--to", "ttt-mlp")
    found = invoke_json(*common)
    assert found["layers"] == [0, 1, 2] and found["num_new_parameters"] == 0
    assert found["transferred"] is found["distilled"] is found["folder"] is None
    assert [layer["layer"] for layer in found["per_layer"]] == [0, 1, 2]
    assert found["num_cache_bytes_per_token"] == 3 * 2 * 2 * 12 * 4
    # One layer alone is what converting that layer gives.
    alone = invoke_json(*common, "--layers", "1", "--whole")
    assert alone["per_layer"] == []
    assert alone["converted"] == found["per_layer"][1]["converted"]
    code, stdout, stderr = invoke(*common, "--max-bytes", "200")
    assert code == 0
    assert "whole model" in stdout and "layer alone" in stdout and "200 bytes" in stdout
    assert "nothing was saved; give --out" in stderr


def test_a_closed_gate_costs_nothing(place: Path) -> None:
    found = invoke_json(place / "model", "--mode", "gated", "--text", place / "text.txt")
    assert found["converted"] == found["before"]
    assert found["per_layer"] == [] and found["num_cache_bytes_per_token"] == 0
    learned = invoke_json(
        place / "model", "--mode", "gated", "--text", place / "text.txt",
        "--train", place / "train.txt", *FEW,
    )  # fmt: skip
    assert learned["transferred"] is None
    assert learned["distilled"]["perplexity"] != learned["before"]["perplexity"]


def test_a_second_run_goes_on_where_the_first_was(place: Path, tmp_path: Path) -> None:
    arguments = (
        place / "model", "--mode", "distilled", "--text", place / "text.txt", "--whole",
        "--train", place / "train.txt", "-o", tmp_path / "out", *FEW,
    )  # fmt: skip
    first = invoke_json(*arguments)
    code, stdout, stderr = invoke(*arguments)
    assert code == 0
    assert "continuing after step 6 of 6" in stderr and "continuing after step 4 of 4" in stderr
    assert f"{first['distilled']['perplexity']:.2f}" in stdout
    assert "--layers none shows" in stderr


def test_a_plan_reads_nothing_but_the_configuration(place: Path, tmp_path: Path) -> None:
    plan = invoke_json(
        place / "model", "--mode", "distilled", "--layers", "last-2", "--text", "none.txt",
        "--train", "no.txt", "-o", tmp_path / "out", "--dry-run", *FEW,
    )  # fmt: skip
    assert plan["layers"] == [1, 2]
    assert [plan["transfer_steps"], plan["lora_steps"]] == [6, 4]
    assert plan["num_new_parameters"] > 0 and plan["num_state_bytes"] > 0
    assert not (tmp_path / "out").exists()
    pure = invoke_json(place / "model", "--text", "none.txt", "--dry-run")
    assert pure["num_new_parameters"] == pure["transfer_steps"] == pure["num_train_tokens"] == 0


def test_seeds(place: Path) -> None:
    common = (place / "model", "--text", place / "text.txt", "--to", "ttt-mlp", "--whole")
    first, same, other = (invoke_json(*common, "--seed", seed) for seed in ("3", "3", "4"))
    assert first["converted"] == same["converted"] != other["converted"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{place}/model"], "text: expected what perplexity is measured on, found nothing; give"),
        (["{place}/model", "--text", "{place}/none.txt"], "none.txt"),
        (["{place}/model", "--text", "{place}/text.txt", "--layers", "3"],
         "expected ascending indices from 0 to 2, found '3'"),
        (["{place}/model", "--text", "{place}/text.txt", "--layers", "some"], "every-N, first-N"),
        (["{place}/model", "--text", "{place}/text.txt", "--to", "mamba"], "conversion.to"),
        (["{place}/model", "--text", "{place}/text.txt", "--mode", "distilled"],
         "train: mode 'distilled' learns from text, found none; give --train FILE"),
        (["{place}/model", "--text", "{place}/text.txt", "--train", "{place}/train.txt"],
         "mode 'pure' has nothing to learn"),
        (["{place}/model", "--mode", "distilled", "--text", "{place}/text.txt", "--train",
          "{place}/text.txt"], "text and train are the same"),
        (["{place}/nothing", "--text", "{place}/text.txt"], "no such directory"),
        (["{place}/nothing", "--text", "{place}/text.txt", "--dry-run"], "nothing"),
        (["{place}/model", "--text", "{place}/text.txt", "-o", "{place}/model"],
         "holds another model; name another folder"),
        (["{place}/model", "--text", "{place}/text.txt", "--set", "conversion.layer=1"],
         "did you mean layers?"),
        (["{place}/model", "--text", "{place}/text.txt", "--set", "max_length=4096"],
         "exceeds the model's limit of 128"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_2(place: Path, arguments: list[str], expected: str) -> None:
    code, _, stderr = invoke(*(argument.format(place=place) for argument in arguments))
    assert code == 2, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and expected in lines[0], stderr


def test_a_converted_model_is_not_converted_again(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    invoke_json(place / "model", "--text", place / "text.txt", "--whole", "-o", out)
    code, _, stderr = invoke(out, "--text", place / "text.txt")
    assert code == 2 and "one that is converted already" in stderr


def test_help_has_an_example_and_json() -> None:
    result = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Example: ttt-adapt convert" in result.output and "--json" in result.output


@pytest.mark.parametrize("name", ["convert_pure", "convert_distilled", "convert_gated"])
def test_recipes(name: str, place: Path) -> None:
    settings = load_settings(ConvertSettings, config_path(name))
    assert settings.conversion.mode == name.removeprefix("convert_")
    train = () if name == "convert_pure" else ("--train", "x.txt")
    plan = invoke_json(place / "model", "-c", name, "--text", "y.txt", *train, "--dry-run")
    assert plan["layers"]


def test_settings_survive_toml(tmp_path: Path) -> None:
    settings = ConvertSettings(text=CorpusSettings(path="a.txt"), train=CorpusSettings(path="b"))
    (tmp_path / "x.toml").write_text(to_toml(settings))
    assert load_settings(ConvertSettings, tmp_path / "x.toml") == settings
    with pytest.raises(SettingsError, match=r"conversion\.layer; did you mean layers\?"):
        make_settings(ConvertSettings, {"conversion": {"layer": "1"}})
