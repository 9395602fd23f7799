"""The fast forms of attention and of LoRA against the plain ones, in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.adaptation import learning
from ttt_adapt.adaptation.attention import blocked_causal_attention, dense_attention
from ttt_adapt.adaptation.learning import IGNORED, chunk_loss, whole_rows
from ttt_adapt.adaptation.low_rank import low_rank_linear as low_rank
from ttt_adapt.testing import tiny_model


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 500), st.integers(1, 9))
def test_blocked_attention_equals_the_plain_one(b: int, h: int, t: int, d: int) -> None:
    torch.manual_seed(t)
    inputs = [random(b, h, t, d) for _ in range(3)]
    found = blocked_causal_attention(inputs[0], inputs[1], inputs[2], d**-0.5)
    expected = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    for first, second in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("length", [5, 191, 350])
def test_blocked_attention_rounds_no_worse_than_twice_the_plain_one(length: int) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(1, 4, length, 64, dtype=torch.float64) for _ in range(3)]
    rounded = [x.bfloat16() for x in exact]
    reference = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=True)
    plain = F.scaled_dot_product_attention(rounded[0], rounded[1], rounded[2], is_causal=True)
    found = blocked_causal_attention(rounded[0], rounded[1], rounded[2], 0.125)
    assert (found - reference).abs().max() <= 2 * (plain - reference).abs().max()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_dense_attention_covers_a_model_and_leaves_no_trace(architecture: str) -> None:
    model = tiny_model(architecture=architecture)
    chunk = torch.randint(2, 258, (100,), generator=torch.Generator().manual_seed(0))
    plain = chunk_loss(model, chunk, autocast=True)
    exact = chunk_loss(model, chunk, autocast=False)
    with dense_attention(model):
        assert model.config._attn_implementation == "ttt_adapt_dense"
        found = chunk_loss(model, chunk, autocast=True)
        assert torch.equal(chunk_loss(model, chunk, autocast=False), exact)
    assert model.config._attn_implementation == "sdpa"
    assert found.item() == pytest.approx(plain.item(), abs=2e-3)
    with pytest.raises(RuntimeError), dense_attention(model):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad(), dense_attention(model), torch.autocast("cpu", dtype=torch.bfloat16):
        padded = model(input_ids=chunk[None], attention_mask=(chunk > 20)[None].long()).logits
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=chunk[None], attention_mask=(chunk > 20)[None].long()).logits
    assert torch.equal(padded, expected)


def test_models_with_another_attention_keep_it() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    with dense_attention(model):
        assert model.config._attn_implementation == "eager"


def test_dense_attention_with_grouped_heads() -> None:
    import transformers

    config: Any = transformers.LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    chunk = torch.arange(2, 200)
    plain = chunk_loss(model, chunk, autocast=True)
    with dense_attention(model):
        found = chunk_loss(model, chunk, autocast=True)
    assert found.item() == pytest.approx(plain.item(), abs=2e-3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "ttt_linear", "ttt_mlp"])
@pytest.mark.parametrize("length", [1, 63, 100])
def test_lengthened_rows_change_neither_loss_nor_gradients(architecture: str, length: int) -> None:
    model = tiny_model(architecture=architecture).double()
    chunk = torch.randint(2, 258, (length + 1,), generator=torch.Generator().manual_seed(length))
    inputs, targets = whole_rows(chunk[:-1], chunk[1:], 128)
    assert len(inputs) == len(targets) == 64 * -(-length // 64)
    logits = model(input_ids=inputs[None], use_cache=False).logits[0]
    found = F.cross_entropy(logits, targets, ignore_index=IGNORED)
    plain = model(input_ids=chunk[None, :-1], use_cache=False).logits[0]
    expected = F.cross_entropy(plain, chunk[1:])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    ours, theirs = (
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for loss in (found, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            # TTT layers compute in float32.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_rows_are_lengthened_to_whole_ones_or_to_the_limit(length: int, limit: int) -> None:
    limit = max(length, limit)
    inputs, targets = whole_rows(torch.arange(length), torch.arange(length) + 1, limit)
    assert len(inputs) == len(targets) == min(limit, 64 * -(-length // 64))
    assert inputs[:length].tolist() == list(range(length))
    assert targets[:length].tolist() == list(range(1, length + 1))
    assert (targets[length:] == IGNORED).all() and (inputs[length:] == length - 1).all()


def test_learning_in_bfloat16_on_a_cpu_takes_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model(max_length=96), list[int]()
    model.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    chunk = torch.arange(2, 82)
    padded = chunk_loss(model, chunk, autocast=True)
    exact = chunk_loss(model, chunk, autocast=False)
    monkeypatch.setattr(learning, "LENGTHS", 1)
    plain = chunk_loss(model, chunk, autocast=True)
    assert seen == [96, 79, 79]
    assert padded.item() == pytest.approx(plain.item(), abs=2e-3)
    assert padded.item() == pytest.approx(exact.item(), abs=0.02)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 4, 2), (7, 5, 1, 3), (4, 6, 6, 1)])
def test_low_rank_gradients(bias: bool, shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    n, i, o, r = shape
    x, a, b = random(n, i), random(r, i), random(o, r)
    weight = random(i, o).detach()
    offset = random(o).detach() if bias else None
    expected = x @ weight + (0 if offset is None else offset) + 1.5 * (x @ a.t()) @ b.t()
    torch.testing.assert_close(low_rank(x, weight, offset, a, b, 1.5), expected)
    assert torch.autograd.gradcheck(
        lambda x, a, b: low_rank(x, weight, offset, a, b, 1.5), (x, a, b)
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_fused_lora_under_autocast_is_no_worse_than_peft(architecture: str) -> None:
    """Against float32, gradients may be off by at most twice what PEFT's own layers are off."""
    import peft

    from ttt_adapt.adaptation.low_rank import fuse

    model = tiny_model(architecture=architecture)
    gpt2 = architecture == "gpt2"
    config = peft.LoraConfig(target_modules="all-linear", fan_in_fan_out=gpt2)
    peft.inject_adapter_in_model(config, model)
    with torch.no_grad():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    fused = copy.deepcopy(model)
    for module in fused.modules():
        if hasattr(module, "lora_A"):
            fuse(module, "default")
    chunk = torch.randint(2, 258, (120,), generator=torch.Generator().manual_seed(1))

    def gradients(which: Any, autocast: bool) -> torch.Tensor:
        leaves = [p for p in which.parameters() if p.requires_grad]
        loss = chunk_loss(which, chunk, autocast=autocast)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])

    exact = gradients(model, False)
    torch.testing.assert_close(gradients(fused, False), exact, rtol=1e-4, atol=1e-6)
    error = (gradients(fused, True) - exact).norm()
    assert error <= 2 * (gradients(model, True) - exact).norm()
