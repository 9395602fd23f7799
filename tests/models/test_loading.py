"""Loading language models: what is accepted, what is refused and in which words."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors

from ttt_adapt.config import ModelSettings
from ttt_adapt.errors import ModelError
from ttt_adapt.models import (
    beginning_token,
    bundled_models,
    load_language_model,
    resolve_model,
    wrap_language_model,
)
from ttt_adapt.models.checkpoints import weight_files
from ttt_adapt.models.language_model import MAX_LENGTH_CAP, position_limit
from ttt_adapt.models.loading import explain_failure
from ttt_adapt.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def save(folder: Path, model: Any = None, *, tokenizer: bool = True, **options: Any) -> Path:
    (model or tiny_model()).save_pretrained(folder, **options)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> Any:
    return load_language_model(ModelSettings(name=str(folder), device="cpu", **settings))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_loads_what_was_saved(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(seed=3, architecture=architecture)
    lm = load(save(tmp_path, model))
    assert lm.max_length == 128
    assert not lm.model.training
    loaded = lm.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    assert lm.model.lm_head.weight is lm.model.get_input_embeddings().weight


def test_half_precision_checkpoint_loads_in_the_dtype_of_the_settings(tmp_path: Path) -> None:
    save(tmp_path, tiny_model().to(torch.bfloat16))
    assert load(tmp_path).model.dtype == torch.float32
    assert load(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    lm = load(save(tmp_path, max_shard_size="40KB"))
    assert len(weight_files(tmp_path)) > 1
    assert torch.equal(lm.model.lm_head.weight, tiny_model().lm_head.weight)


def test_fingerprint_covers_weights_tokenizer_config_and_dtype(tmp_path: Path) -> None:
    first = load(save(tmp_path / "a")).fingerprint
    assert first == load(save(tmp_path / "b")).fingerprint
    assert first != load(save(tmp_path / "c", tiny_model(seed=1))).fingerprint
    assert first != load(tmp_path / "a", dtype="bfloat16").fingerprint
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace("1e-06", "2e-06"))
    assert first != load(tmp_path / "b").fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    tokenizer = tmp_path / "d" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"\\u0000"'))
    assert first != load(tmp_path / "d").fingerprint


def test_fingerprint_follows_a_rewritten_file(tmp_path: Path) -> None:
    first = load(save(tmp_path)).fingerprint
    assert first != load(save(tmp_path, tiny_model(seed=1))).fingerprint


def test_fingerprint_does_not_depend_on_use(tmp_path: Path) -> None:
    first = wrap_language_model(tiny_model(), tiny_tokenizer(), name="tiny")
    first.tokenizer(["a", "bc"], padding=True, truncation=True, max_length=1)
    again = wrap_language_model(tiny_model(), first.tokenizer, name="other")
    other = wrap_language_model(tiny_model(seed=1), tiny_tokenizer(), name="tiny")
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_missing_directory() -> None:
    with pytest.raises(ModelError, match=r"/no/such/place: no such directory; give a local dir"):
        load(Path("/no/such/place"))


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a model directory with config\.json"):
        load(tmp_path)


def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    (tmp_path / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    with pytest.raises(ModelError, match=r"found only pytorch_model\.bin, which loading would unp"):
        load(tmp_path)
    assert not canary.exists()


def test_no_weights(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="expected weights in safetensors, found none"):
        load(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    save(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(ModelError, match="cannot be loaded: SafetensorError"):
        load(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded: .*tokenizer"):
        load(save(tmp_path, tokenizer=False))


def test_code_in_a_repository_does_not_run(tmp_path: Path) -> None:
    save(tmp_path)
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass M: ...\nclass C: ...\n")
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text()
        .replace('"model_type": "llama"', '"model_type": "evil"')
        .replace("{", '{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},', 1)
    )
    with pytest.raises(ModelError, match="needs code from its own repository; read that code"):
        load(tmp_path)
    assert not canary.exists()


def test_encoders_are_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    save(tmp_path / "headless", transformers.BertModel(config))
    with pytest.raises(ModelError, match="the checkpoint lacks .* weights of a causal language"):
        load(tmp_path / "headless")
    save(tmp_path / "masked", transformers.BertLMHeadModel(config))
    with pytest.raises(ModelError, match="a later token changes an earlier prediction"):
        load(tmp_path / "masked")


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=258, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16
    )
    save(tmp_path, transformers.T5ForConditionalGeneration(config))
    with pytest.raises(ModelError, match="not a causal language model"):
        load(tmp_path)


def test_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="makes token 259, the model knows 258 tokens"):
        load(tmp_path)


def test_beginning_token() -> None:
    tokenizer = tiny_tokenizer()
    assert beginning_token(tokenizer) == 0
    tokenizer.bos_token = None
    assert beginning_token(tokenizer) == 0
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="a beginning \\(bos\\) or end \\(eos\\) token, found nei"):
        beginning_token(tokenizer)


def test_position_limit() -> None:
    assert position_limit(transformers.GPT2Config(n_positions=77)) == 77
    assert position_limit(transformers.LlamaConfig(max_position_embeddings=10**6)) == MAX_LENGTH_CAP
    assert position_limit(transformers.BloomConfig()) == MAX_LENGTH_CAP


def test_bundled_names_resolve_to_directories() -> None:
    for name in bundled_models():
        assert (Path(resolve_model(name)) / "config.json").is_file()
    assert resolve_model("owner/name") == "owner/name"


def test_unknown_hub_name_offline() -> None:
    code = (
        "from ttt_adapt.models import load_language_model\n"
        "from ttt_adapt.config import ModelSettings\n"
        "try:\n    load_language_model(ModelSettings(name='nobody/nothing'))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.startswith(
        "ModelError nobody/nothing: not in the local cache and the hub cannot be reached; give"
    )
    assert done.stdout.count("\n") == 1


def test_hub_refusals_name_their_remedy() -> None:
    settings = ModelSettings(name="owner/model", revision="v9")
    # The hub's client brings its own HTTP library, whose name has changed between versions.
    response_type: Any = vars(hub_errors)["Response"]
    http: Any = sys.modules[response_type.__module__.split(".")[0]]
    response = response_type(403, request=http.Request("GET", "https://example.org"))
    gated = OSError("wrapped")
    gated.__cause__ = hub_errors.GatedRepoError("gated", response=response)
    assert "accept its terms on its hub page and run `hf auth" in str(
        explain_failure(gated, settings)
    )
    revision = hub_errors.RevisionNotFoundError("none", response=response)
    assert "no such revision v9" in str(explain_failure(revision, settings))
