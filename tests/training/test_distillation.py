"""Distillation of converted models: losses fall, runs repeat, nothing but what should learn does."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttt_adapt.conversion_settings import ConversionSettings, DistillationSettings
from ttt_adapt.errors import (
    AdaptationError,
    CorpusError,
    FingerprintMismatchError,
    ModelError,
)
from ttt_adapt.models.conversion import convert_model, layers_in_role, trained_parameters
from ttt_adapt.testing import sample_text, silent, tiny_attention_model, tiny_tokenizer
from ttt_adapt.training import distillation
from ttt_adapt.training.checkpoint import save_checkpoint
from ttt_adapt.training.distillation import (
    StageResult,
    attention_projections,
    pack_tokens,
    recover_with_lora,
    transfer_attention,
    transfer_errors,
)

STEPS = DistillationSettings(
    max_length=24, batch_size=2, transfer_steps=12, lora_steps=8, lora_learning_rate=3e-3,
    checkpoint_every=4,
)  # fmt: skip


def text_tokens(num_texts: int = 12, first: int = 0) -> Any:
    texts = (sample_text(seed, 40) for seed in range(first, first + num_texts))
    return pack_tokens(tiny_tokenizer(), texts, 0, 10_000)


def converted(family: str = "llama", mode: str = "distilled", **settings: Any) -> Any:
    settings = {"layers": "0,2", "mini_batch_size": 4, "mode": mode, **settings}
    return convert_model(tiny_attention_model(family), ConversionSettings(**settings))


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def held_out(model: Any) -> dict[int, float]:
    ids = torch.from_numpy(text_tokens(2, first=100)[:96].reshape(2, 48))
    with torch.no_grad():
        return {layer: float(error) for layer, error in transfer_errors(model, ids).items()}


@torch.no_grad()
def cross_entropy(model: Any) -> float:
    ids = torch.from_numpy(text_tokens(4, first=100)[:192].reshape(4, 48))
    return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("to", ["ttt-linear", "ttt-mlp"])
def test_attention_transfer_lowers_the_error_of_every_layer(family: str, to: str) -> None:
    model = converted(family, to=to, hidden_factor=2)
    before, frozen = held_out(model), snapshot(model)
    result = transfer_attention(model, text_tokens(), STEPS, report=silent)
    after = held_out(model)
    assert before.keys() == after.keys() == {0, 2}
    assert all(after[layer] < before[layer] for layer in before)
    assert len(result.losses) == 12 and result.num_tokens == 12 * 2 * 24
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, frozen[n])}
    assert changed and changed <= trained_parameters(model).keys()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_transfer_errors_are_those_of_the_definition() -> None:
    """Against outputs recorded with hooks, on the original's hidden states."""
    model = converted("qwen3")
    ids = torch.from_numpy(text_tokens()[:48].reshape(2, 24))
    inputs: dict[int, Any] = {}
    wanted: dict[int, torch.Tensor] = {}
    layers = model.base.model.layers

    def remember(index: int) -> Any:
        def hook(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
            inputs[index], wanted[index] = (args, options), output[0]

        return hook

    hooks = [
        layers[i].self_attn.register_forward_hook(remember(i), with_kwargs=True) for i in (0, 2)
    ]
    with torch.no_grad(), layers_in_role(model, "original"):
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        found = transfer_errors(model, ids)
        for index, (args, options) in inputs.items():
            learned = layers[index].self_attn(*args, **options)[0]
            error = (learned - wanted[index]).square().sum() / wanted[index].square().sum()
            torch.testing.assert_close(found[index], error)


def test_runs_repeat_whatever_the_global_random_state() -> None:
    results = []
    for state in (1, 2):
        torch.manual_seed(state)
        model = converted()
        transfer_attention(model, text_tokens(), STEPS, seed=5, report=silent)
        recover_with_lora(model, text_tokens(), STEPS, seed=5, report=silent)
        results.append(snapshot(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    other = converted()
    transfer_attention(other, text_tokens(), STEPS, seed=6, report=silent)
    recover_with_lora(other, text_tokens(), STEPS, seed=6, report=silent)
    assert any(not torch.equal(results[0][n], v) for n, v in other.state_dict().items())


@pytest.mark.parametrize("stage", ["transfer", "lora"])
def test_an_interrupted_stage_ends_with_the_same_weights(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: Any, folder: Path | None) -> StageResult:
        function = transfer_attention if stage == "transfer" else recover_with_lora
        return function(model, text_tokens(), STEPS, folder=folder, report=silent)

    whole = converted()
    expected = run(whole, None)

    def save_and_stop(*args: Any, **options: Any) -> Path:
        save_checkpoint(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distillation, "save_checkpoint", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(converted(), tmp_path)
    model = converted()
    assert run(model, tmp_path).losses == expected.losses
    wanted = snapshot(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    other = STEPS.model_copy(update={"batch_size": 1})
    function: Any = transfer_attention if stage == "transfer" else recover_with_lora
    with pytest.raises(FingerprintMismatchError, match="under other settings"):
        function(converted(), text_tokens(), other, folder=tmp_path, report=silent)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_lora_lowers_the_loss_and_leaves_an_ordinary_model(family: str) -> None:
    model = converted(family)
    names, before, frozen = set(model.state_dict()), cross_entropy(model), snapshot(model)
    settings = STEPS.model_copy(update={"lora_steps": 20, "kl_weight": 0.0})
    recover_with_lora(model, text_tokens(), settings, report=silent)
    assert cross_entropy(model) < before
    assert set(model.state_dict()) == names
    assert not hasattr(model, "peft_config")
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, frozen[n])}
    weights = {f"{name}.weight" for name in attention_projections(model)}
    assert changed - trained_parameters(model).keys() == weights
    assert len(attention_projections(model)) == 3 * (2 if family == "gpt2" else 4)


def test_the_divergence_is_from_the_original_and_the_gate_may_learn() -> None:
    """A gated model with closed gates is the original: nothing to diverge from, nothing to learn."""
    closed = converted(mode="gated")
    settings = STEPS.model_copy(update={"kl_weight": 1.0, "lora_steps": 2})
    result = recover_with_lora(closed, text_tokens(), settings, report=silent)
    assert abs(result.losses[0]) < 1e-5
    open_gate = converted(mode="gated", alpha=0.5)
    assert recover_with_lora(open_gate, text_tokens(), settings, report=silent).losses[0] > 1e-3
    learning = converted(mode="gated")
    recover_with_lora(learning, text_tokens(), STEPS, report=silent)
    alphas = [p for n, p in trained_parameters(learning).items() if n.endswith("alpha")]
    assert len(alphas) == 2 and all(bool((alpha != 0).any()) for alpha in alphas)


def test_without_converted_layers_lora_is_a_control() -> None:
    model = converted(layers="none")
    before = cross_entropy(model)
    settings = STEPS.model_copy(update={"lora_steps": 20, "kl_weight": 0.0})
    recover_with_lora(model, text_tokens(), settings, report=silent)
    assert cross_entropy(model) < before
    with pytest.raises(ModelError, match="parameters of their own, found none"):
        transfer_attention(model, text_tokens(), STEPS, report=silent)


def test_chosen_targets() -> None:
    model = converted()
    frozen = snapshot(model)
    settings = STEPS.model_copy(update={"lora_targets": ("up_proj",), "lora_steps": 2})
    recover_with_lora(model, text_tokens(), settings, report=silent)
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, frozen[n])}
    others = changed - trained_parameters(model).keys()
    assert len(others) == 3 and all(name.endswith("up_proj.weight") for name in others)
    wrong = STEPS.model_copy(update={"lora_targets": ("sideways_proj",)})
    with pytest.raises(ModelError, match="LoRA: .*sideways_proj"):
        recover_with_lora(converted(), text_tokens(), wrong, report=silent)


def test_what_cannot_learn() -> None:
    with pytest.raises(ModelError, match="found none; convert with mode='distilled'"):
        transfer_attention(converted(mode="pure"), text_tokens(), STEPS, report=silent)
    half = converted().to(torch.bfloat16)
    with pytest.raises(ModelError, match="expected a model in float32 to learn with, found torch"):
        transfer_attention(half, text_tokens(), STEPS, report=silent)
    with pytest.raises(CorpusError, match="expected more than 24 tokens to train on, found 9"):
        transfer_attention(converted(), text_tokens()[:9], STEPS, report=silent)
    with pytest.raises(CorpusError, match="the text to learn from is empty"):
        pack_tokens(tiny_tokenizer(), iter(()), 0, 10)
    broken = converted()
    with torch.no_grad():
        broken.base.model.embed_tokens.weight[5:] = math.inf
    with pytest.raises(AdaptationError, match="the loss became nan at step 0; lower the stage's"):
        transfer_attention(broken, text_tokens(), STEPS, report=silent)


def test_packed_tokens() -> None:
    tokenizer = tiny_tokenizer()
    found = pack_tokens(tokenizer, iter(["ab", "c"]), 0, 100)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "c")]
    assert found.tolist() == [0, *ids[0], 0, *ids[1]]
    assert pack_tokens(tokenizer, iter(["abcdef"] * 9), 0, 10).shape == (10,)
    assert found.dtype == np.int64
