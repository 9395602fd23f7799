"""Bits per byte: known analytically, against an obvious loop, and under every bad input."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from ttt_adapt.errors import ModelError, SettingsError, UserError
from ttt_adapt.evaluation.scoring import (
    LossyTokenizerWarning,
    batch_cuts,
    bits_per_byte,
    model_max_length,
    negative_log_likelihood,
    warn_if_lossy,
)
from ttt_adapt.evaluation.windows import make_windows
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

TEXTS = [sample_text(1, 3), sample_text(2, 90), "x", "naïve 東京 🙂 \x00\n", sample_text(3, 31)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    # Larger weights than at initialisation, so that the outputs differ enough to tell apart.
    model = tiny_model(7, architecture=request.param)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


def wrap(inner: Tokenizer, **special: str) -> Any:
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=inner, **special)


def uniform_model() -> Any:
    model = tiny_model(architecture="gpt2")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # tied to the input embeddings
    return model


def naive_nats(
    model: Any, text: Sequence[int], *, max_length: int, stride: int | None = None, **more: Any
) -> float:
    """One window at a time, all log-probabilities, float64."""
    total = 0.0
    for window in make_windows(text, beginning=0, max_length=max_length, stride=stride, **more):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window.read()])).logits[0]
        rows = torch.log_softmax(logits.double(), dim=-1)[-window.num_scored :]
        for row, target in zip(rows, window.targets(), strict=True):
            total -= float(row[target])
    return total


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_uniform_model_needs_log2_v_bits_for_each_byte_token(tokenizer: Any) -> None:
    texts = ["", "a", "hello world", "東京🙂", sample_text(0, 100)]
    result = bits_per_byte(uniform_model(), tokenizer, texts)
    assert result.value == pytest.approx(math.log2(258), abs=1e-6)
    for text, score in zip(texts, result.per_text, strict=True):
        assert score.num_bytes == score.num_tokens == len(text.encode())
        assert score.nats == pytest.approx(len(text.encode()) * math.log(258), rel=1e-6)
    assert result.total.num_bytes == sum(len(text.encode()) for text in texts)


def test_bytes_are_of_the_text_not_of_the_tokens() -> None:
    """One token a word: V words of equal probability, whatever their lengths in bytes."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "ab": 1, "東京": 2}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = wrap(inner, bos_token="<s>")
    (score,) = bits_per_byte(uniform_model(), words, ["ab 東京 ab"]).per_text
    assert (score.num_tokens, score.num_bytes) == (3, 2 + 1 + 6 + 1 + 2)
    assert score.bits_per_byte == pytest.approx(3 * math.log2(258) / 12, abs=1e-6)


def test_empty_text_scores_nothing(model: Any, tokenizer: Any) -> None:
    result = bits_per_byte(model, tokenizer, ["", "a"])
    assert (result.per_text[0].nats, result.per_text[0].num_bytes) == (0.0, 0)
    assert math.isnan(result.per_text[0].bits_per_byte)
    assert result.total == result.per_text[1]
    assert bits_per_byte(model, tokenizer, []).total.num_tokens == 0


@pytest.mark.parametrize(
    ("max_length", "stride"), [(128, None), (17, None), (17, 5), (17, 16), (2, 1), (1, 1)]
)
def test_equals_one_window_at_a_time(
    model: Any, tokenizer: Any, max_length: int, stride: int | None
) -> None:
    texts = TEXTS if max_length > 2 else TEXTS[::2]
    result = bits_per_byte(
        model, tokenizer, texts, max_length=max_length, stride=stride, batch_size=3
    )
    for text, score in zip(texts, result.per_text, strict=True):
        expected = naive_nats(model, ids_of(tokenizer, text), max_length=max_length, stride=stride)
        assert score.nats == pytest.approx(expected, rel=1e-5)


def test_prefix_and_context_are_read_but_not_scored(model: Any, tokenizer: Any) -> None:
    prefix, context = ids_of(tokenizer, sample_text(8, 5)), sample_text(9, 6)
    contexts = [context, "", "é", context]
    result = bits_per_byte(
        model, tokenizer, TEXTS[:4], max_length=40, stride=20, prefix=prefix, contexts=contexts
    )
    for text, before, score in zip(TEXTS, contexts, result.per_text, strict=False):
        expected = naive_nats(
            model, ids_of(tokenizer, text), max_length=40, stride=20,
            prefix=prefix, context=ids_of(tokenizer, before),
        )  # fmt: skip
        assert score.nats == pytest.approx(expected, rel=1e-5)
        assert score.num_bytes == score.num_tokens == len(text.encode())
    plain = bits_per_byte(model, tokenizer, TEXTS[:4], max_length=40, stride=20)
    assert abs(plain.total.nats - result.total.nats) > 1.0


def test_context_and_continuation_add_up_to_the_whole(model: Any, tokenizer: Any) -> None:
    """p(whole) = p(first half) · p(second half | first half), where both fit in one window."""
    first, second = sample_text(4, 7), sample_text(5, 6)
    whole = bits_per_byte(model, tokenizer, [first + second]).total
    one = bits_per_byte(model, tokenizer, [first]).total
    two = bits_per_byte(model, tokenizer, [second], contexts=[first]).total
    assert one.nats + two.nats == pytest.approx(whole.nats, rel=1e-6)
    assert one.num_bytes + two.num_bytes == whole.num_bytes


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_batch_size_and_neighbours_do_not_matter(
    model: Any, tokenizer: Any, batch_size: int
) -> None:
    alone = [bits_per_byte(model, tokenizer, [text], max_length=50).total.nats for text in TEXTS]
    together = bits_per_byte(model, tokenizer, TEXTS, max_length=50, batch_size=batch_size)
    assert [score.nats for score in together.per_text] == pytest.approx(alone, rel=1e-6)
    order = [3, 1, 4, 0, 2]
    shuffled = bits_per_byte(
        model, tokenizer, [TEXTS[i] for i in order], max_length=50, batch_size=batch_size
    )
    assert [score.nats for score in shuffled.per_text] == pytest.approx(
        [alone[i] for i in order], rel=1e-6
    )


def test_more_context_helps_a_model_that_uses_it(tokenizer: Any) -> None:
    """After learning to repeat itself, a smaller stride needs fewer bits."""
    model = tiny_model(3, max_length=64)
    text = sample_text(11, 8) + " "
    inputs = torch.tensor([[0, *ids_of(tokenizer, text * 2)][:64]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
    bits = [
        bits_per_byte(model, tokenizer, [text * 6], max_length=32, stride=stride).value
        for stride in (32, 16, 4)
    ]
    assert bits[0] > bits[1] > bits[2]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50)), st.integers(1, 9), st.integers(1, 100))
def test_batches_keep_their_limits(lengths: list[int], batch_size: int, max_tokens: int) -> None:
    lengths = sorted(lengths, reverse=True)
    cuts = batch_cuts(lengths, batch_size, max_tokens)
    assert (cuts[0], cuts[-1]) == (0, len(lengths))
    for first, last in pairwise(cuts):
        assert 1 <= last - first <= batch_size
        assert last - first == 1 or (last - first) * lengths[first] <= max_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 5, 1000])
def test_log_likelihood_block_by_block(dtype: torch.dtype, block: int) -> None:
    torch.manual_seed(0)
    logits = (30 * torch.randn(23, 91)).to(dtype)
    targets = torch.randint(0, 91, (23,))
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum")
    found = negative_log_likelihood(logits, targets, block)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_bfloat16_is_close_and_float32_ignores_a_callers_autocast(
    model: Any, tokenizer: Any
) -> None:
    exact = bits_per_byte(model, tokenizer, TEXTS).total.nats
    rough = bits_per_byte(model, tokenizer, TEXTS, precision="bfloat16").total.nats
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bits_per_byte(model, tokenizer, TEXTS).total.nats == exact


def test_the_model_is_left_as_it_was(tokenizer: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    model: Any = GPT2LMHeadModel(config)  # dropout 0.1
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    first = bits_per_byte(model, tokenizer, TEXTS).total.nats
    assert bits_per_byte(model, tokenizer, TEXTS).total.nats == first  # no dropout meanwhile
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    # Scoring must leave nothing behind that a training step cannot differentiate through.
    model(input_ids=torch.tensor([[0, 1]]), labels=torch.tensor([[0, 1]])).loss.backward()


def test_works_through_a_lora_adapter(model: Any, tokenizer: Any) -> None:
    import copy

    from peft import LoraConfig, get_peft_model

    target = "c_attn" if model.config.model_type == "gpt2" else "q_proj"
    plain = bits_per_byte(model, tokenizer, TEXTS, max_length=30, stride=10)
    lora = LoraConfig(target_modules=[target], fan_in_fan_out=target == "c_attn")
    adapted = get_peft_model(copy.deepcopy(model), lora)  # starts as the identity
    assert bits_per_byte(adapted, tokenizer, TEXTS, max_length=30, stride=10) == plain


def test_a_nan_model_scores_nan(tokenizer: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    assert math.isnan(bits_per_byte(model, tokenizer, ["ab"]).value)


def test_faster_than_a_window_at_a_time(tokenizer: Any) -> None:
    """A loose bound on a busy machine; the README has measured figures."""
    model = tiny_model(architecture="gpt2")
    texts = [sample_text(seed, 8) for seed in range(150)]

    def naive() -> None:
        for text in texts:
            naive_nats(model, ids_of(tokenizer, text), max_length=128)

    def timed(action: Any) -> float:
        start = time.process_time()
        action()
        return time.process_time() - start

    fast = min(timed(lambda: bits_per_byte(model, tokenizer, texts)) for _ in range(2))
    assert fast < timed(naive)


def test_length_limits(tokenizer: Any) -> None:
    model = tiny_model(max_length=64)
    assert model_max_length(model, tokenizer) == 64
    with pytest.raises(SettingsError, match="max_length 65 exceeds the model's limit of 64"):
        bits_per_byte(model, tokenizer, ["a"], max_length=65)
    config = BloomConfig(vocab_size=258, hidden_size=32, n_layer=1, n_head=2)
    model = BloomForCausalLM(config)  # positions by attention bias: no limit of its own
    assert model_max_length(model, tokenizer) is None
    with pytest.raises(ModelError, match="states no length limit; pass max_length"):
        bits_per_byte(model, tokenizer, ["a"])
    assert bits_per_byte(model, tokenizer, ["a"], max_length=64).total.num_tokens == 1
    known = tiny_tokenizer()
    known.model_max_length = 32
    assert model_max_length(model, known) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"stride": 1000}, "stride must be between 1 and max_length"),
        ({"precision": "int8"}, "precision must be float32 or bfloat16, found 'int8'"),
    ],
)
def test_settings_out_of_range(
    model: Any, tokenizer: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        bits_per_byte(model, tokenizer, ["a"], **arguments)


def test_bad_texts(model: Any, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"text 1: a lone surrogate \(U\+DC80\) at character 2"):
        bits_per_byte(model, tokenizer, ["fine", "no\udc80"])
    with pytest.raises(UserError, match="context 0: a lone surrogate"):
        bits_per_byte(model, tokenizer, ["fine"], contexts=["\ud800"])
    with pytest.raises(UserError, match="a sequence of texts, found one string"):
        bits_per_byte(model, tokenizer, "fine")
    with pytest.raises(UserError, match="text 0: expected str, found bytes"):
        bits_per_byte(model, tokenizer, [b"fine"])  # type: ignore[list-item]
    with pytest.raises(UserError, match="one context a text: 2 texts, 1 contexts"):
        bits_per_byte(model, tokenizer, ["a", "b"], contexts=["c"])


def test_another_models_tokenizer(model: Any, tokenizer: Any) -> None:
    foreign = tiny_tokenizer()
    foreign.add_tokens(["kernel"])
    with pytest.raises(ModelError, match="do not fit the model's vocabulary of 258"):
        bits_per_byte(model, foreign, ["kernel"])
    with pytest.raises(ModelError, match="do not fit the model's vocabulary of 258"):
        bits_per_byte(model, tokenizer, ["a"], prefix=[258])
    with pytest.raises(ModelError, match="token ids -1 to"):
        bits_per_byte(model, tokenizer, ["a"], prefix=[-1])


def test_fewer_outputs_than_inputs(tokenizer: Any) -> None:
    model = tiny_model()
    model.lm_head = torch.nn.Linear(32, 100, bias=False)
    with pytest.raises(ModelError, match="beyond the model's 100 outputs"):
        bits_per_byte(model, tokenizer, ["a long enough text, with {braces}"])


def test_no_beginning_token(model: Any) -> None:
    nameless = wrap(tiny_tokenizer().backend_tokenizer)
    with pytest.raises(ModelError, match="found neither"):
        bits_per_byte(model, nameless, ["a"])
    nameless.eos_token = "<|endoftext|>"
    assert bits_per_byte(model, nameless, ["a"]).total.num_tokens == 1


def test_lossy_tokenizers_are_found(model: Any, tokenizer: Any) -> None:
    texts = ["plain", "SHOUT", "two  spaces"]
    assert warn_if_lossy(tokenizer, [*texts, "東京 🙂"]) == []
    inner = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])
    inner.decoder = decoders.ByteLevel()
    lossy = wrap(inner, bos_token="<|endoftext|>")
    with pytest.warns(LossyTokenizerWarning, match=r"1 of 3 texts \(the first is number 1\)"):
        assert warn_if_lossy(lossy, texts) == [1]
    (score,) = bits_per_byte(model, lossy, [" SHOUT "]).per_text
    assert (score.num_bytes, score.num_tokens) == (7, 5)  # still bytes of the text
    with pytest.raises(ModelError, match="text 0: the tokenizer made no tokens of 2 bytes"):
        bits_per_byte(model, lossy, ["  "])
