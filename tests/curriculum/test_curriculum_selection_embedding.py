"""Vectors of tasks: from a policy's hidden states, and kept on disk."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ttt_adapt.conversion_settings import ConversionSettings
from ttt_adapt.curriculum import CurriculumSelectionSettings, Task, embed_tasks, select_curriculum
from ttt_adapt.curriculum.selecting import EncoderOfTasks, PolicyEmbedder, load_task_embedder
from ttt_adapt.curriculum.selecting import embedding as embedding_module
from ttt_adapt.curriculum.selecting.embedders import without_head
from ttt_adapt.embedding.hashing import HashingEmbedder
from ttt_adapt.errors import (
    CorpusError,
    FingerprintMismatchError,
    ModelError,
    SettingsError,
    TaskError,
)
from ttt_adapt.models.conversion import convert_model
from ttt_adapt.models.language_model import LanguageModel, wrap_language_model
from ttt_adapt.testing import sample_text, tiny_attention_model, tiny_model, tiny_tokenizer

Settings = CurriculumSelectionSettings
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
)


def policy(architecture: str = "llama", seed: int = 0) -> LanguageModel:
    return wrap_language_model(
        tiny_model(seed, architecture=architecture), tiny_tokenizer(), name="tiny"
    )


def some_tasks(num: int, words: int = 6) -> list[Task]:
    return [
        Task(str(n), "exact", sample_text(n, 1 + n % words), "a", meta={"problem": f"problem {n}"})
        for n in range(num)
    ]


def hidden_states(model: LanguageModel, text: str) -> NDArray[np.float32]:
    """``[T, H]`` of one text alone, from the model with its head."""
    ids = torch.tensor([model.tokenizer(text, add_special_tokens=False).input_ids])
    with torch.no_grad():
        states = model.model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    found: NDArray[np.float32] = states[0].numpy()
    return found


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "ttt_linear"])
@pytest.mark.parametrize("kind", ["policy-mean", "policy-last"])
def test_vectors_are_the_hidden_states_of_each_text_alone(architecture: str, kind: str) -> None:
    """Whatever the batch: padding is on the right, so also with absolute positions."""
    model = policy(architecture)
    embedder = PolicyEmbedder(model, Settings.model_validate({"embedder": kind, "batch_size": 4}))
    tasks = some_tasks(11)
    found = embed_tasks(tasks, embedder)
    assert found.dtype == np.float32
    assert found.shape == (11, embedder.dimension)
    for row, task in zip(found, tasks, strict=True):
        states = hidden_states(model, task.prompt)
        expected = states.mean(axis=0) if kind == "policy-mean" else states[-1]
        np.testing.assert_allclose(row, expected, atol=2e-5)
    assert embedder.centred == (kind == "policy-mean")


def test_converted_models_give_their_own_states() -> None:
    model = convert_model(tiny_attention_model("llama"), ConversionSettings())
    converted = wrap_language_model(model, tiny_tokenizer(), name="converted")
    tasks = some_tasks(3)
    found = embed_tasks(tasks, PolicyEmbedder(converted))
    for row, task in zip(found, tasks, strict=True):
        expected = hidden_states(converted, task.prompt).mean(axis=0)
        np.testing.assert_allclose(row, expected, atol=1e-4)


def test_adapters_are_part_of_the_policy() -> None:
    from peft import LoraConfig, get_peft_model

    model = policy()
    plain = embed_tasks(some_tasks(3), PolicyEmbedder(model))
    adapted = get_peft_model(model.model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    language_model = wrap_language_model(adapted, model.tokenizer, name="adapted")
    found = embed_tasks(some_tasks(3), PolicyEmbedder(language_model))
    assert np.abs(found - plain).max() > 1e-3
    assert not hasattr(without_head(adapted), "lm_head")


def test_chat_templates_are_applied_and_can_be_left_out() -> None:
    model = policy()
    model.tokenizer.chat_template = TEMPLATE
    wrapped = PolicyEmbedder(model)
    assert wrapped.texts([Task("t", "exact", "alpha", "a")]) == ["<user>alpha</s>"]
    assert "chat template" in wrapped.description
    plain = PolicyEmbedder(model, Settings(chat_template="never"))
    assert plain.texts([Task("t", "exact", "alpha", "a")]) == ["alpha"]
    assert plain.fingerprint != wrapped.fingerprint
    states = hidden_states(model, "<user>alpha</s>")
    np.testing.assert_allclose(
        embed_tasks([Task("t", "exact", "alpha", "a")], wrapped)[0], states.mean(axis=0), atol=2e-5
    )


def test_long_prompts_keep_their_end() -> None:
    model = policy()
    short = PolicyEmbedder(model, Settings(max_tokens=16, embedder="policy-last"))
    text = sample_text(5, 40)
    found = short.embed([text])[0]
    np.testing.assert_allclose(found, hidden_states(model, text[-16:])[-1], atol=2e-5)
    limited = PolicyEmbedder(model).embed([text * 5])
    assert np.isfinite(limited).all()


def test_problems_or_prompts() -> None:
    tasks = some_tasks(2)
    model = policy()
    assert PolicyEmbedder(model).texts(tasks) == [task.prompt for task in tasks]
    assert PolicyEmbedder(model, Settings(text="problem")).texts(tasks)[1] == "problem 1"
    encoder = load_task_embedder(Settings(embedder="hashing"))
    assert encoder.texts(tasks) == ["problem 0", "problem 1"]
    whole = load_task_embedder(Settings(embedder="hashing", text="prompt"))
    assert whole.texts(tasks) == [task.prompt for task in tasks]
    assert "each task's prompt" in whole.description


def test_an_empty_prompt_stands_as_the_beginning_token() -> None:
    model = policy()
    found = PolicyEmbedder(model).embed(["", "alpha"])
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([[0]]), output_hidden_states=True)
    np.testing.assert_allclose(found[0], states.hidden_states[-1][0, 0].numpy(), atol=2e-5)


def test_fingerprints_tell_models_and_settings_apart() -> None:
    model = policy()
    fingerprints = {
        PolicyEmbedder(model).fingerprint,
        PolicyEmbedder(policy(seed=1)).fingerprint,
        PolicyEmbedder(model, Settings(embedder="policy-last")).fingerprint,
        PolicyEmbedder(model, Settings(max_tokens=9)).fingerprint,
    }
    assert len(fingerprints) == 4
    assert PolicyEmbedder(policy(), Settings(batch_size=3)).fingerprint in fingerprints


def test_what_a_policy_cannot_do() -> None:
    model = policy()
    with pytest.raises(SettingsError, match="expected 'policy-mean' or 'policy-last'"):
        PolicyEmbedder(model, Settings(embedder="sentence"))
    with pytest.raises(SettingsError, match="max_tokens 500 exceeds the 128 that tiny reads"):
        PolicyEmbedder(model, Settings(max_tokens=500))
    with pytest.raises(CorpusError, match="one string"):
        PolicyEmbedder(model).embed("alpha")
    with torch.no_grad():
        model.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        PolicyEmbedder(model).embed(["alpha"])


def test_the_bundled_policy_and_the_sentence_encoder_load() -> None:
    tasks = some_tasks(6)
    for kind, width in (("policy-mean", 256), ("sentence", 384)):
        wanted = Settings.model_validate(
            {"embedder": kind, "num_select": 2, "max_tokens": 32, "device": "cpu"}
        )
        found = select_curriculum(tasks[:5], tasks[5:], wanted)
        assert len(found.tasks) == 2
        assert found.report.dimension == width


class Counting(HashingEmbedder):
    """Counts texts, and may be ended in the middle."""

    def __init__(self, fail_after: int | None = None) -> None:
        super().__init__(32)
        self.num_texts = 0
        self.fail_after = fail_after

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        if self.fail_after is not None and self.num_texts >= self.fail_after:
            raise KeyboardInterrupt
        self.num_texts += len(texts)
        return super().embed(texts, progress=progress)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_module, "SHARD_TEXTS", 8)


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    tasks = [Task(str(n), "exact", f"text {n}", "a") for n in range(30)]
    whole = embed_tasks(tasks, EncoderOfTasks(Counting()))
    with pytest.raises(KeyboardInterrupt):
        embed_tasks(tasks, EncoderOfTasks(Counting(fail_after=16)), tmp_path)
    second = Counting()
    seen: list[tuple[int, int]] = []
    found = embed_tasks(
        tasks, EncoderOfTasks(second), tmp_path, lambda done, total: seen.append((done, total))
    )
    assert second.num_texts == 14
    assert seen == [(8, 30), (16, 30), *((done, 30) for done in range(17, 31))]
    np.testing.assert_array_equal(found, whole)
    third = Counting()
    np.testing.assert_array_equal(
        embed_tasks(tasks[::-1], EncoderOfTasks(third), tmp_path), whole[::-1]
    )
    assert third.num_texts == 0


@pytest.mark.usefixtures("small_shards")
def test_a_policy_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    tasks = some_tasks(20, words=9)
    whole = embed_tasks(tasks, PolicyEmbedder(policy()), tmp_path / "whole")
    embedder: Any = PolicyEmbedder(policy())
    plain, calls = embedder.embed, []

    def ended(texts: Sequence[str], **options: Any) -> NDArray[np.float32]:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(texts)  # type: ignore[no-any-return]

    embedder.embed = ended
    with pytest.raises(KeyboardInterrupt):
        embed_tasks(tasks, embedder, tmp_path / "ended")
    found = embed_tasks(tasks, PolicyEmbedder(policy()), tmp_path / "ended")
    np.testing.assert_array_equal(found, whole)


def test_equal_texts_are_embedded_once(tmp_path: Path) -> None:
    counting = Counting()
    tasks = [Task(str(n), "exact", f"text {n % 3}", "a") for n in range(9)]
    found = embed_tasks(tasks, EncoderOfTasks(counting), tmp_path)
    assert counting.num_texts == 3
    np.testing.assert_array_equal(found[:3], found[3:6])


@pytest.mark.usefixtures("small_shards")
def test_damaged_shards_are_made_again(tmp_path: Path) -> None:
    tasks = [Task(str(n), "exact", f"text {n}", "a") for n in range(24)]
    whole = embed_tasks(tasks, EncoderOfTasks(Counting()), tmp_path)
    shards = sorted(tmp_path.glob("*/*.npz"))
    assert len(shards) == 3
    content = bytearray(shards[0].read_bytes())
    content[len(content) // 2] ^= 0xFF
    shards[0].write_bytes(bytes(content))
    shards[1].write_bytes(shards[1].read_bytes()[:100])
    second = Counting()
    np.testing.assert_array_equal(embed_tasks(tasks, EncoderOfTasks(second), tmp_path), whole)
    assert second.num_texts == 16
    third = Counting()
    embed_tasks(tasks, EncoderOfTasks(third), tmp_path)
    assert third.num_texts == 0


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    tasks = [Task("t", "exact", "text", "a")]
    embed_tasks(tasks, EncoderOfTasks(Counting()), tmp_path)
    shard = next(tmp_path.glob("*/*.npz"))
    np.savez(shard, keys=np.array([object()]), vectors=np.array([object()]))
    second = Counting()
    embed_tasks(tasks, EncoderOfTasks(second), tmp_path)
    assert second.num_texts == 1


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    tasks = [Task("t", "exact", "text", "a")]
    embed_tasks(tasks, EncoderOfTasks(Counting()), tmp_path)
    manifest = next(tmp_path.glob("*/embedder.json"))
    manifest.write_text(json.dumps({"format_version": 99}), encoding="utf-8")
    with pytest.raises(FingerprintMismatchError, match="choose another cache folder"):
        embed_tasks(tasks, EncoderOfTasks(Counting()), tmp_path)


def test_nothing_to_embed() -> None:
    with pytest.raises(TaskError, match="at least one task"):
        embed_tasks([], EncoderOfTasks(Counting()))
