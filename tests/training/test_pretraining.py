"""Pretraining on real files: resumable to the bit, killed and continued, loadable afterwards."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ttt_adapt.config import PretrainSettings
from ttt_adapt.errors import (
    AdaptationError,
    CorpusError,
    FingerprintMismatchError,
    ModelError,
)
from ttt_adapt.storage import sha256_file
from ttt_adapt.testing import silent, tiny_pretraining, write_training_corpus
from ttt_adapt.training import plan_pretraining, pretrain, pretraining


def tiny_settings(**changes: Any) -> PretrainSettings:
    """Short rows first."""
    return tiny_pretraining(**{"early_length": 16, **changes})


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_loss_falls_and_model_loads(tmp_path: Path, optimizer: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_training_corpus(tmp_path)
    out = tmp_path / "model"
    settings = tiny_settings(optimizer=optimizer, num_tokens=32 * 4 * 40, learning_rate=1e-2)
    result = pretrain(settings, out, data_root=tmp_path, report=silent)
    rows = (out / "loss.csv").read_text().splitlines()
    first, last = (float(rows[i].split(",")[1]) for i in (1, -1))
    assert last < first - 1.0
    assert result.finished and result.num_steps == 40
    assert result.validation_loss_nats < first
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "naïve 词 \t  def f(x):\n    return 12345"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.dtype == torch.float16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    card = (out / "README.md").read_text()
    assert "corpus.jsonl" in card and "tokens seen" in card


def test_continued_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    settings = tiny_settings()
    whole = pretrain(settings, tmp_path / "whole", data_root=tmp_path, report=silent)
    for stop in (3, 7, None):
        pretrain(settings, tmp_path / "parts", data_root=tmp_path, stop_after=stop, report=silent)
    name = "model.safetensors"
    assert sha256_file(tmp_path / "whole" / name) == sha256_file(tmp_path / "parts" / name)
    # With nothing left to do, the last validation is still known.
    again = pretrain(settings, tmp_path / "parts", data_root=tmp_path, report=silent)
    assert again.validation_loss_nats == whole.validation_loss_nats > 0


def test_ctrl_c_within_a_step_ends_after_it(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    settings = tiny_settings(num_tokens=32 * 4 * 60, checkpoint_every=100)
    told: list[str] = []

    def interrupt(line: str) -> None:
        told.append(line)
        if line.startswith("step 20/"):
            threading.Timer(0.003, signal.raise_signal, [signal.SIGINT]).start()

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain(settings, tmp_path / "parts", data_root=tmp_path, report=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step; once more stops at once" in told
    assert re.fullmatch(r"interrupted: saved after step \d+; .*", told[-1])
    pretrain(settings, tmp_path / "parts", data_root=tmp_path, report=silent)
    pretrain(settings, tmp_path / "whole", data_root=tmp_path, report=silent)
    name = "model.safetensors"
    assert sha256_file(tmp_path / "whole" / name) == sha256_file(tmp_path / "parts" / name)


def test_larger_budget_continues_the_constant_stretch(tmp_path: Path) -> None:
    """Before the decay a longer run has the same weights as a shorter one with as many steps."""
    write_training_corpus(tmp_path)
    short = tiny_settings(num_tokens=32 * 4 * 12, warmup_fraction=0.1)
    long = tiny_settings(num_tokens=32 * 4 * 20, warmup_fraction=0.06)
    pretrain(short, tmp_path / "extended", data_root=tmp_path, stop_after=6, report=silent)
    pretrain(long, tmp_path / "extended", data_root=tmp_path, stop_after=8, report=silent)
    pretrain(long, tmp_path / "long", data_root=tmp_path, stop_after=8, report=silent)
    step = "checkpoints/step-00000008/state.safetensors"
    extended, direct = load_file(tmp_path / "extended" / step), load_file(tmp_path / "long" / step)
    assert extended.keys() == direct.keys()
    assert all(torch.equal(extended[key], direct[key]) for key in extended)


KILLED = """
import sys
from pathlib import Path
from ttt_adapt.testing import tiny_pretraining
from ttt_adapt.training import pretrain
folder = Path({folder!r})
settings = tiny_pretraining(early_length=16, checkpoint_every=1)
pretrain(settings, folder / "killed", data_root=folder, report=lambda line: print(line, flush=True))
"""


def test_killed_run_continues_to_the_same_bytes(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    settings = tiny_settings(checkpoint_every=1)
    script = KILLED.format(folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 60
    while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    pretrain(settings, tmp_path / "killed", data_root=tmp_path, report=silent)
    pretrain(settings, tmp_path / "whole", data_root=tmp_path, report=silent)
    name = "model.safetensors"
    assert sha256_file(tmp_path / "whole" / name) == sha256_file(tmp_path / "killed" / name)
    assert not list(checkpoints.glob("*.partial-*"))


def test_other_settings_are_refused(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    pretrain(tiny_settings(), tmp_path / "m", data_root=tmp_path, stop_after=2, report=silent)
    with pytest.raises(FingerprintMismatchError, match="other settings"):
        pretrain(
            tiny_settings(learning_rate=0.5), tmp_path / "m", data_root=tmp_path, report=silent
        )


def test_diverging_run_says_so(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    settings = tiny_settings(optimizer="adamw", learning_rate=1e30, num_tokens=32 * 4 * 30)
    with pytest.raises((AdaptationError, RuntimeError), match="became nan|non-finite"):
        pretrain(settings, tmp_path / "m", data_root=tmp_path, report=silent)


def test_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"corpus\.jsonl"):
        plan_pretraining(tiny_settings(), tmp_path)


def test_plan_counts_what_the_run_has(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    plan = plan_pretraining(tiny_settings(), tmp_path)
    result = pretrain(tiny_settings(), tmp_path / "m", data_root=tmp_path, report=silent)
    assert plan["num_steps"] == result.num_steps
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert plan["num_parameters"] == sum(tensor.numel() for tensor in tensors.values())


def test_continues_a_finished_model_where_it_stopped_reading(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    first = tmp_path / "first"
    pretrain(tiny_settings(), first, data_root=tmp_path, report=silent)
    used = 32 * 4 * 12
    settings = tiny_settings(initial_model=str(first), skip_tokens=used, num_tokens=32 * 4 * 2)
    result = pretrain(settings, tmp_path / "more", data_root=tmp_path, report=silent)
    assert (tmp_path / "more" / "tokenizer.json").read_bytes() == (
        first / "tokenizer.json"
    ).read_bytes()
    begun, ended = (
        float((folder / "loss.csv").read_text().splitlines()[1].split(",")[1])
        for folder in (tmp_path / "more", first)
    )
    assert begun < ended - 0.3 and result.num_steps == 2
    card = (tmp_path / "more" / "README.md").read_text()
    assert "of them before" in card and "further, from the weights of `first`, by" in card


def test_skipped_tokens_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_training_corpus(tmp_path)
    read: dict[str, list[bytes]] = {}
    original = pretraining._Run._loss

    for name, skip in (("all", 0), ("rest", 32 * 4 * 2)):
        blocks: list[bytes] = read.setdefault(name, [])

        def loss(
            run: Any, batch: torch.Tensor, length: int, blocks: list[bytes] = blocks
        ) -> torch.Tensor:
            if run.model.training:
                blocks.append(batch.numpy().tobytes())
            return original(run, batch, length)

        monkeypatch.setattr(pretraining._Run, "_loss", loss)
        settings = tiny_settings(skip_tokens=skip, num_tokens=32 * 4 * 6)
        pretrain(settings, tmp_path / name, data_root=tmp_path, report=silent)
    assert read["rest"][:8] == read["all"][4:]


def test_initial_model_of_another_shape(tmp_path: Path) -> None:
    write_training_corpus(tmp_path)
    pretrain(tiny_settings(), tmp_path / "first", data_root=tmp_path, report=silent)
    settings = tiny_settings(initial_model=str(tmp_path / "first"), hidden_size=64)
    with pytest.raises(ModelError, match=r"weights differ.*pretrain\.toml"):
        pretrain(settings, tmp_path / "more", data_root=tmp_path, report=silent)
