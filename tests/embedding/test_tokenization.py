"""Token ids of a cut text equal those of the whole text; batches hold every text once."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from ttt_adapt.embedding.resolution import find_offline_model
from ttt_adapt.embedding.tokenization import TextTokenizer, length_sorted_batches
from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.testing import WORDS, tiny_tokenizer

SAMPLE = [
    " ".join(WORDS),
    "don't they'll we've 123456789 1,000,000 漢字かな交じり文",
    "    if x:\n\n\treturn",
]


def wrap(backend: Tokenizer, **special: str) -> Any:
    make: Any = PreTrainedTokenizerFast  # without annotations
    return make(tokenizer_object=backend, **special)


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator(SAMPLE * 3, trainer)
    return wrap(backend, unk_token="<unk>", eos_token="<|endoftext|>")


def digits_from_the_right() -> Any:
    """Groups of three as people write them: the first group's size depends on the run's end."""
    split = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*(?!\d))"), "isolated")
    return trained(pre_tokenizers.Sequence([split, pre_tokenizers.Whitespace()]))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {
        "wordpiece": AutoTokenizer.from_pretrained(find_offline_model()),
        "bytes": tiny_tokenizer(),
        "byte-level": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "metaspace": trained(pre_tokenizers.Metaspace(), normalizers.NFKC()),
        "digits": digits_from_the_right(),
        "one-word": trained(pre_tokenizers.Split("\x00", "isolated")),
    }


def expected(tokenizer: Any, text: str, max_tokens: int) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=max_tokens).input_ids
    return ids


NAMES = ["wordpiece", "bytes", "byte-level", "metaspace", "digits", "one-word"]

piece = st.sampled_from(
    [" ", "\n", "a", "a ", "! ", "don't", "we'll've", "12345", "1,234 ", "é", "e\u0301", "漢字", "字 ",
     "👩\u200d🔬", "[SEP]", "<|endoftext|>", "[SE", "window ", "x" * 101, "\x00", "\u200b", "ﬁ", "Ⅷ "]
)  # fmt: skip
long_text = st.lists(st.tuples(piece, st.integers(1, 60)), max_size=25).map(
    lambda parts: "".join(text * times for text, times in parts)
)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=50)
@given(texts=st.lists(long_text, min_size=1, max_size=3), max_tokens=st.integers(3, 40))
def test_equals_the_whole_text_truncated(
    tokenizers: dict[str, Any], name: str, texts: list[str], max_tokens: int
) -> None:
    tokenizer = tokenizers[name]
    found = TextTokenizer(tokenizer, max_tokens)([*texts, "a"])
    for ids, text in zip(found, texts, strict=False):
        whole = expected(tokenizer, text, max_tokens)
        assert ids.tolist() == (whole or [tokenizer.eos_token_id])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "a b c d e f g h " * 3000,
        "?!" * 20_000,
        "漢字" * 9000,
        "1234" * 5000,
        "x" * 30_000 + " end",
        " " * 30_000 + "end of it",
        "e\u0301" * 9000,
        "word\n" * 9000,
    ],
    ids=["letters", "marks", "han", "digits", "one word", "spaces", "accents", "lines"],
)
def test_long_texts_of_every_shape(tokenizers: dict[str, Any], name: str, text: str) -> None:
    ids = TextTokenizer(tokenizers[name], 256)([text])[0].tolist()
    assert ids == expected(tokenizers[name], text, 256)


def test_the_name_of_a_special_token_across_the_cut() -> None:
    name = "<the name of one token has many words here>"
    tokenizer: Any = AutoTokenizer.from_pretrained(find_offline_model())
    tokenizer.add_tokens([name], special_tokens=True)
    tokenise = TextTokenizer(tokenizer, 8)
    # Spaces cost WordPiece no tokens, so every cut falls into the name for some number of them.
    for num_spaces in range(180, 260):
        text = " " * num_spaces + name + "!" * 2000
        assert tokenise([text])[0].tolist() == expected(tokenizer, text, 8)


def test_a_text_of_a_million_characters_costs_little(tokenizers: dict[str, Any]) -> None:
    text = "the window of the river " * 42_000
    whole_start = time.process_time()
    whole = expected(tokenizers["wordpiece"], text, 256)
    whole_s = time.process_time() - whole_start
    start = time.process_time()
    ids = TextTokenizer(tokenizers["wordpiece"], 256)([text])[0].tolist()
    assert time.process_time() - start < whole_s / 10
    assert ids == whole


def test_a_tokenizer_in_python_reads_whole_texts() -> None:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    found = TextTokenizer(tokenizer, 8)(["long enough to cut", ""])
    assert found[0].tolist() == expected(tokenizer, "long enough to cut", 8)
    assert found[1].tolist() == expected(tokenizer, "", 8)


def test_max_tokens_needs_room_beside_special_tokens(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="max_tokens 2 leaves no room .* set at least 3"):
        TextTokenizer(tokenizers["wordpiece"], 2)


def test_an_empty_text_needs_some_token() -> None:
    nameless = wrap(tiny_tokenizer().backend_tokenizer)
    with pytest.raises(ModelError, match="an empty text has no tokens"):
        TextTokenizer(nameless, 8)([""])


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 8), st.integers(1, 100))
def test_batches_hold_every_text_once(lengths: list[int], size: int, budget: int) -> None:
    batches = list(length_sorted_batches(lengths, batch_size=size, token_budget=budget))
    order = [position for batch in batches for position in batch]
    assert order == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for batch in batches:
        assert 1 <= len(batch) <= size
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
