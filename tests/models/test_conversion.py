"""Converted models of every family: equal at a closed gate, pure in pure mode, cached as uncached."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from ttt_adapt.conversion_settings import ConversionSettings
from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.models.conversion import (
    FAMILIES,
    convert_model,
    converted_layers,
    layers_in_role,
    trained_parameters,
)
from ttt_adapt.models.conversion.families import real_tokens
from ttt_adapt.settings import make_settings
from ttt_adapt.testing import tiny_attention_model

FAMILY_NAMES = sorted(FAMILIES)
LENGTH = 19
CASES = [(mode, to) for mode in ("pure", "gated", "distilled") for to in ("ttt-linear", "ttt-mlp")]


def tokens(rows: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (rows, length), generator=generator)


def converted(family: str, seed: int = 0, **settings: Any) -> Any:
    """Layers 0 and 2 of three; in learned modes mini-batches of 4, and parameters off their start."""
    if settings.get("mode", "pure") != "pure":
        settings = {"mini_batch_size": 4, "hidden_factor": 2, **settings}
    if settings.get("mode") == "gated":
        settings = {"alpha": 0.5, **settings}
    chosen = ConversionSettings(**{"layers": "0,2", **settings})
    model = convert_model(tiny_attention_model(family, seed), chosen)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trained_parameters(model).items():
            if not name.endswith("alpha"):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return found


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("to", ["ttt-linear", "ttt-mlp"])
def test_a_closed_gate_changes_no_bit(family: str, to: str) -> None:
    before = logits(tiny_attention_model(family), tokens())
    model = converted(family, mode="gated", to=to, layers="all", alpha=0.0)
    assert torch.equal(logits(model, tokens()), before)
    with torch.no_grad():
        converted_layers(model)[1].alpha.fill_(0.3)
    assert not torch.allclose(logits(model, tokens()), before, atol=1e-3)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("to", ["ttt-linear", "ttt-mlp"])
def test_pure_mode_has_the_base_s_parameters_and_no_other(family: str, to: str) -> None:
    base = tiny_attention_model(family)
    expected = {name: value.clone() for name, value in base.named_parameters()}
    model = convert_model(base, make_settings(ConversionSettings, {"to": to}))
    found = {
        name.removeprefix("base.").replace("attn.attention.", "attn."): value
        for name, value in model.named_parameters()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert trained_parameters(model) == {} and len(converted_layers(model)) == 3


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_learned_layers_begin_where_pure_ones_stand(family: str) -> None:
    for to in ("ttt-linear", "ttt-mlp"):
        pure = convert_model(
            tiny_attention_model(family),
            ConversionSettings(to=to, mini_batch_size=4),
        )
        learned = convert_model(
            tiny_attention_model(family),
            ConversionSettings(to=to, mode="distilled", mini_batch_size=4),
        )
        torch.testing.assert_close(
            logits(learned, tokens()), logits(pure, tokens()), atol=1e-4, rtol=1e-4
        )
        assert len(trained_parameters(learned)) > 0


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3"])
@pytest.mark.parametrize(("mode", "to"), CASES)
@torch.no_grad()
def test_with_cache_equals_without(family: str, mode: str, to: str) -> None:
    model, ids = converted(family, mode=mode, to=to), tokens()
    whole = logits(model, ids)
    parts, cache = [], DynamicCache(config=model.config)
    for first, last in ((0, 1), (1, 7), (7, 8), (8, 9), (9, LENGTH)):
        done = model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True)
        parts.append(done.logits)
        assert cache.get_seq_length() == last
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "mode", "to"),
    [
        *((family, "pure", "ttt-linear") for family in FAMILY_NAMES),
        *(("gpt2", mode, to) for mode, to in CASES[1:]),
        ("llama", "distilled", "ttt-mlp"),
        ("mistral", "gated", "ttt-linear"),
    ],
)
def test_generation(family: str, mode: str, to: str) -> None:
    """Greedy, with beams, and left-padded, each against the same without a cache."""
    model, ids = converted(family, mode=mode, to=to), tokens(2, 11)
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    ones = torch.ones_like(ids)
    for more in ({}, {"num_beams": 3}):
        slow = model.generate(ids, attention_mask=ones, use_cache=False, **options, **more)
        fast = model.generate(ids, attention_mask=ones, **options, **more)
        assert torch.equal(fast, slow)
    padded = torch.ones(2, 15, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    padded[0, 4:], mask[0, 4:] = ids[0], 1
    padded[1, 6:], mask[1, 6:] = ids[1, :9], 1
    together = model.generate(padded, attention_mask=mask, **options)
    for row, alone in ((0, ids[:1]), (1, ids[1:, :9])):
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(together[row, 15:], expected[0, alone.shape[1] :])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rotary", ["original", "mini-batch", "none"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_padding_changes_nothing(family: str, rotary: str, attention: str) -> None:
    model, ids = converted(family, mode="distilled", rotary=rotary), tokens()
    model.set_attn_implementation(attention)
    expected = logits(model, ids)
    padded = torch.ones(2, LENGTH + 5, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, first in ((0, 5), (1, 0)):
        padded[row, first : first + LENGTH], mask[row, first : first + LENGTH] = ids[row], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=mask, position_ids=positions)
    kept = found[mask.bool()].view(2, LENGTH, -1)
    torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inner_norm", [False, True])
@pytest.mark.parametrize("rotary", ["mini-batch", "none"])
@pytest.mark.parametrize("qk_norm", ["l2", "none"])
@torch.no_grad()
def test_settings_of_the_inner_learner(inner_norm: bool, rotary: str, qk_norm: str) -> None:
    options: dict[str, Any] = {"inner_norm": inner_norm, "rotary": rotary, "qk_norm": qk_norm}
    model, ids = converted("qwen3", mode="distilled", **options), tokens()
    whole = logits(model, ids)
    assert bool(whole.isfinite().all())
    assert not torch.allclose(whole, logits(converted("qwen3", mode="distilled"), ids), atol=1e-3)
    prefix = model(input_ids=ids[:, :6], use_cache=True)
    rest = model(input_ids=ids[:, 6:], past_key_values=prefix.past_key_values, use_cache=True)
    torch.testing.assert_close(rest.logits, whole[:, 6:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_positions_within_the_mini_batch_repeat() -> None:
    """One mini-batch later, the same tokens turn by the same angles."""
    model = converted("llama", layers="0", rotary="mini-batch", mini_batch_size=4)
    layer, seen = converted_layers(model)[0], []
    model.base.model.rotary_emb.register_forward_hook(
        lambda module, inputs, options, output: seen.append((*inputs, *options.values())[1]),
        with_kwargs=True,
    )
    logits(model, tokens(1, 10))
    assert seen[-1].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
    assert layer.inner.mini_batch_size == 4


@torch.no_grad()
def test_the_cache_s_size_does_not_grow() -> None:
    model = converted("llama", layers="all")

    def size(length: int) -> int:
        cache: Any = model(input_ids=tokens(1, length), use_cache=True).past_key_values
        states = [layer.state.tensors().values() for layer in cache.layers]
        return sum(tensor.numel() for state in states for tensor in state)

    assert size(3) == size(90)
    values = sum(layer.inner.num_state_values for layer in converted_layers(model))
    assert size(3) == values + len(converted_layers(model))  # and how many tokens are open


@torch.no_grad()
def test_one_layer_alone_equals_converting_one_layer() -> None:
    ids = tokens()
    whole = converted("qwen2", layers="all")
    alone = logits(converted("qwen2", layers="1"), ids)
    with layers_in_role(whole, "original", (0, 2)):
        assert torch.equal(logits(whole, ids), alone)
    with layers_in_role(whole, "original"):
        assert torch.equal(logits(whole, ids), logits(tiny_attention_model("qwen2"), ids))
    assert {layer.role for layer in converted_layers(whole)} == {"converted"}


def test_gradients_reach_every_new_parameter() -> None:
    for mode, to in CASES[2:]:
        model = converted("qwen3", mode=mode, to=to)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        for name, parameter in trained_parameters(model).items():
            assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for enabled in (False, True):
        model = converted("llama", mode="distilled").train()
        if enabled:
            model.activation_checkpointing_enable()
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in trained_parameters(model).items()})
    torch.testing.assert_close(gradients[1], gradients[0])


@torch.no_grad()
def test_caches_that_do_not_fit() -> None:
    model, ids = converted("llama"), tokens()
    foreign = tiny_attention_model("llama")(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ModelError, match="found DynamicLayer at layer 0; pass a new DynamicCache"):
        model(input_ids=ids[:, :1], past_key_values=foreign)
    static = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ModelError, match="found StaticLayer at layer 0"):
        model(input_ids=ids, past_key_values=static, use_cache=True)
    own = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ModelError, match="cannot forget tokens they have read"):
        own.layers[0].crop(-1)
    own.reset()
    again = model(input_ids=ids, past_key_values=own, use_cache=True).logits
    torch.testing.assert_close(again, logits(model, ids))


@torch.no_grad()
def test_cache_rows_are_chosen_and_repeated() -> None:
    for mode in ("pure", "gated"):
        model, ids = converted("mistral", mode=mode), tokens(3, 12)
        whole = logits(model, ids)
        cache: Any = model(input_ids=ids[:, :10], use_cache=True).past_key_values
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        rest = ids[[2, 2, 0, 0], 10:]
        found = model(input_ids=rest, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, whole[[2, 2, 0, 0], 10:], atol=1e-4, rtol=1e-4)


def test_what_cannot_be_converted() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config  # it has no types
    other = make(
        AutoConfig.for_model("gpt_neox", hidden_size=32, num_hidden_layers=1, vocab_size=258,
                             num_attention_heads=2, intermediate_size=32)
    )  # fmt: skip
    with pytest.raises(ModelError, match="of type gpt2, llama, mistral, qwen2, qwen3, found 'gpt_"):
        convert_model(other, ConversionSettings())
    with pytest.raises(ModelError, match="one that is converted already"):
        convert_model(converted("llama"), ConversionSettings())
    with pytest.raises(SettingsError, match="expected ascending indices from 0 to 2, found '3'"):
        convert_model(tiny_attention_model("llama"), ConversionSettings(layers="3"))
    packed = tokens(1, 8)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ModelError, match="expected one sequence in each row, found several packed"):
        logits(converted("llama"), packed, position_ids=positions)
    with pytest.raises(ModelError, match="attn_implementation='sdpa'"):
        real_tokens(torch.ones(2, 3, 4), 2, 4)


def test_layers_none_is_the_original() -> None:
    model = converted("gpt2", layers="none")
    assert torch.equal(logits(model, tokens()), logits(tiny_attention_model("gpt2"), tokens()))
    assert model.config.conversion["layers"] == "none"


@pytest.mark.parametrize("inner_norm", [False, True])
@torch.no_grad()
def test_autocast_does_not_reach_the_state(inner_norm: bool) -> None:
    model = converted("qwen3", mode="distilled", inner_norm=inner_norm)
    with torch.autocast("cpu", torch.bfloat16):
        done = model(input_ids=tokens(), use_cache=True)
        model(input_ids=tokens()[:, :3], past_key_values=done.past_key_values, use_cache=True)
    state = done.past_key_values.layers[0].state
    assert {tensor.dtype for tensor in (*state.weights, *state.slots)} == {torch.float32}
    assert bool(done.logits.isfinite().all())


@torch.no_grad()
def test_half_precision() -> None:
    base = tiny_attention_model("llama").to(torch.bfloat16)
    model = convert_model(base, ConversionSettings(mode="distilled", mini_batch_size=4))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    done = model(input_ids=tokens(), use_cache=True)
    assert done.logits.dtype == torch.bfloat16 and bool(done.logits.isfinite().all())
    assert done.past_key_values.layers[0].state.weights[0].dtype == torch.float32
