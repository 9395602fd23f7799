"""Agreement with lm-evaluation-harness, its own code on the same model and texts."""

from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte as harness_bits_per_byte
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import processors

from ttt_adapt.evaluation.scoring import bits_per_byte
from ttt_adapt.evaluation.windows import make_windows
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

TEXTS = [
    "a",
    "multi-byte: naïve, 東京, 🙂🙂, здравствуйте",
    sample_text(1, 30),
    sample_text(2, 200),
    "tabs\tand\r\nline ends\n\n",
    "a document that says <|endoftext|> in its middle",
]


def harness_nats(model: Any, tokenizer: Any, max_length: int, **more: Any) -> list[float]:
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=max_length, **more
    )
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=position)
        for position, text in enumerate(TEXTS)
    ]
    return [-value for value in harness.loglikelihood_rolling(requests, disable_tqdm=True)]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("max_length", [128, 33])
def test_bits_per_byte_agree(architecture: str, max_length: int) -> None:
    model, tokenizer = tiny_model(5, architecture=architecture), tiny_tokenizer()
    theirs = harness_nats(model, tokenizer, max_length)
    ours = bits_per_byte(model, tokenizer, TEXTS, max_length=max_length, batch_size=4)
    assert [score.nats for score in ours.per_text] == pytest.approx(theirs, rel=1e-5)
    pairs = [(-nats, len(text.encode("utf-8"))) for nats, text in zip(theirs, TEXTS, strict=True)]
    assert ours.value == pytest.approx(harness_bits_per_byte(pairs), abs=1e-5)


def test_the_models_own_length_is_the_harness_own() -> None:
    model, tokenizer = tiny_model(5, max_length=77), tiny_tokenizer()
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    assert harness.max_length == 77
    theirs = harness_nats(model, tokenizer, 77)
    ours = bits_per_byte(model, tokenizer, TEXTS)
    assert ours.total.nats == pytest.approx(sum(theirs), rel=1e-5)


def test_a_tokenizer_that_adds_a_beginning_token_agrees_when_told_not_to() -> None:
    """Left to itself the harness counts the token that the tokenizer adds as if it were text."""
    model, tokenizer = tiny_model(5), tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            ),
        ]
    )
    assert tokenizer("a")["input_ids"][0] == 0
    ours = bits_per_byte(model, tokenizer, TEXTS)
    told = harness_nats(model, tokenizer, 128, add_bos_token=False)
    assert [score.nats for score in ours.per_text] == pytest.approx(told, rel=1e-5)
    untold = harness_nats(model, tokenizer, 128)
    assert sum(untold) > ours.total.nats + 1.0


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_are_the_harness_windows(num_tokens: int, stride: int) -> None:
    tokens, max_length = list(range(100, 100 + num_tokens)), 8
    theirs = list(
        get_rolling_token_windows(tokens, 0, max_length, context_len=max_length - stride + 1)
    )
    ours = make_windows(tokens, beginning=0, max_length=max_length, stride=stride)
    for window, (read, targets) in zip(ours, theirs, strict=True):
        assert (window.read(), window.targets()) == (read, targets)
        if stride == max_length:
            # The harness' disjoint windows: what it moves out of the context is read all the same.
            disjoint, _ = make_disjoint_window((read, targets))
            assert window.read() == [*disjoint, *targets[:-1]]
