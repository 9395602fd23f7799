"""Reading as adaptation: what a TTT model predicts after passages is what it would in one go."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ttt_adapt.adaptation import (
    Reading,
    create_adapter,
    load_state,
    save_state,
)
from ttt_adapt.config import AdaptationSettings, make_settings
from ttt_adapt.errors import (
    AdaptationError,
    FingerprintMismatchError,
    ModelError,
    SettingsError,
)
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.layers import TTTLayer
from ttt_adapt.models import LanguageModel, generate, wrap_language_model
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

TEXTS = [sample_text(number, 9) for number in range(5)]
QUERY = sample_text(50, 14)


@pytest.fixture(params=["ttt_linear", "ttt_mlp"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return make_lm(request.param)


def make_lm(architecture: str = "ttt_linear", seed: int = 0) -> LanguageModel:
    model = tiny_model(seed, max_length=128, architecture=architecture)
    return wrap_language_model(model, tiny_tokenizer(), name=architecture)


def points(lm: LanguageModel, texts: list[str], steps: tuple[int, ...], **options: Any) -> Any:
    exact = {"precision": "float32", "half_life": 0, **options}
    settings = AdaptationSettings(method="fast-weights", **exact)
    found = []
    with create_adapter(lm, settings) as adapter, adapter.episode([texts], steps=steps) as episode:
        for point in episode.points():
            found.append((point, score(lm, point.model)))
        (learned,) = episode.learned
    return found, learned


def score(lm: LanguageModel, model: Any) -> float:
    return bits_per_byte(model, lm.tokenizer, [QUERY], max_length=128).value


def tokens_of(lm: LanguageModel, texts: list[str]) -> list[int]:
    return [token for text in texts for token in (0, *lm.tokenizer(text)["input_ids"])]


def expected_score(lm: LanguageModel, texts: list[str]) -> float:
    """The query's bits per byte when everything is read in one forward pass, without a cache."""
    query = tokens_of(lm, [QUERY])
    read = tokens_of(lm, texts)
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([read + query]), use_cache=False).logits[0]
    shares = logits[len(read) :].double().log_softmax(-1)
    nats = -sum(float(shares[i, token]) for i, token in enumerate(query[1:]))
    return float(nats / len(QUERY.encode()) / torch.log(torch.tensor(2.0)))


def test_nearest_is_read_last(lm: LanguageModel) -> None:
    found, learned = points(lm, TEXTS, (0, 1, 3, 5, 9))
    for (point, value), count in zip(found, (0, 1, 3, 5, 5), strict=True):
        assert point.step_reached == count
        assert value == pytest.approx(expected_score(lm, TEXTS[:count][::-1]), rel=1e-5)
    assert learned is not None
    assert learned.num_tokens == len(tokens_of(lm, TEXTS)) and not learned.stopped


@pytest.mark.parametrize("order", ["nearest-first", "as-selected", "random"])
def test_other_orders_go_on_from_step_to_step(lm: LanguageModel, order: str) -> None:
    found, learned = points(lm, TEXTS, (2, 3), order=order)
    for (_, value), count in zip(found, (2, 3), strict=True):
        assert value == pytest.approx(expected_score(lm, TEXTS[:count]), rel=1e-5)
    assert learned is not None and learned.num_tokens == len(tokens_of(lm, TEXTS[:3]))


def test_a_long_passage_is_read_in_blocks(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttt_adapt.adaptation.fast_weights.BLOCK_TOKENS", 7)
    found, _ = points(lm, TEXTS, (5,))
    assert found[0][1] == pytest.approx(expected_score(lm, TEXTS[::-1]), rel=1e-5)


def test_reading_in_bfloat16_is_nearly_the_same(lm: LanguageModel) -> None:
    exact, rounded = (points(lm, TEXTS, (5,), precision=p)[0] for p in ("float32", "bfloat16"))
    assert exact[0][1] != rounded[0][1] == pytest.approx(exact[0][1], rel=5e-3)
    reading = Reading(lm, autocast=True)
    reading.read(TEXTS)
    assert {tensor.dtype for tensor in reading.state.tensors().values()} <= {
        torch.float32,
        torch.int64,
    }


def fast_weights_of(reading: Reading) -> list[torch.Tensor]:
    return [weight for block in reading.state.states for weight in block.mixer.fast.weights]


def initial_weights_of(lm: LanguageModel) -> list[torch.Tensor]:
    layers = [layer for layer in lm.model.modules() if isinstance(layer, TTTLayer)]
    return [weight for layer in layers for weight in layer.initial_weights().values()]


def test_fast_weights_keep_half_after_a_half_life(lm: LanguageModel) -> None:
    num_tokens = len(tokens_of(lm, TEXTS[:1]))
    everything, half, nothing = (Reading(lm, half_life=n) for n in (0, num_tokens, 1))
    for reading in (everything, half, nothing):
        reading.read(TEXTS[:1])
    begun = initial_weights_of(lm)
    learned = fast_weights_of(everything)
    assert all(not torch.equal(a, b[None]) for a, b in zip(learned, begun, strict=True))
    for kept, whole, initial in zip(fast_weights_of(half), learned, begun, strict=True):
        torch.testing.assert_close(kept - initial, (whole - initial) / 2)
    for left, initial in zip(fast_weights_of(nothing), begun, strict=True):
        torch.testing.assert_close(left, initial[None])
    scores = [score(lm, reading.model) for reading in (everything, half, nothing)]
    assert len({*scores, score(lm, lm.model)}) == 4


def test_forgetting_is_a_setting(lm: LanguageModel) -> None:
    found, _ = points(lm, TEXTS, (5,), half_life=50)
    reading = Reading(lm, half_life=50)
    reading.read(TEXTS[::-1])
    assert found[0][1] == score(lm, reading.model)
    assert AdaptationSettings().half_life > 0
    with pytest.raises(SettingsError, match=r"half_life.*greater than or equal to 0 \(found -1\)"):
        make_settings(AdaptationSettings, {"half_life": -1})


def test_state_has_the_same_size_whatever_is_read(lm: LanguageModel) -> None:
    sizes = set()
    for count in (1, 5):
        reading = Reading(lm)
        reading.read(TEXTS[:count])
        sizes.add(reading.state.num_bytes())
    assert len(sizes) == 1


def test_model_is_untouched_and_batches_share_the_state(lm: LanguageModel) -> None:
    before = [parameter.clone() for parameter in lm.model.parameters()]
    reading = Reading(lm)
    reading.read(TEXTS)
    alone = score(lm, reading.model)
    both = bits_per_byte(reading.model, lm.tokenizer, [TEXTS[0], QUERY], max_length=128)
    assert both.per_text[1].bits_per_byte == pytest.approx(alone, rel=1e-5)
    assert score(lm, reading.model) == alone
    assert all(map(torch.equal, before, lm.model.parameters()))


def test_generation_continues_what_was_read(lm: LanguageModel) -> None:
    from dataclasses import replace

    reading = Reading(lm)
    reading.read(TEXTS[:2])
    found = generate(
        replace(lm, model=reading.model), QUERY, max_new_tokens=8, temperature=0.0, seed=0
    )
    prefix = [*tokens_of(lm, TEXTS[:2]), 0]
    long = replace(lm, max_length=4096)
    ids = [*prefix[1:], *lm.tokenizer(QUERY)["input_ids"]]
    expected = generate(
        long, "", max_new_tokens=8, temperature=0.0, seed=0, prefix=ids
    )  # the beginning token comes first in both
    assert found == expected


def test_reading_ends_before_a_state_that_is_not_finite(lm: LanguageModel) -> None:
    poison = "~"
    (token,) = lm.tokenizer(poison, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[token] = float("nan")
    reading = Reading(lm)
    reading.read([*TEXTS[:2], poison, TEXTS[3]])
    reading.read(TEXTS)
    assert reading.stopped == reading.learned().stopped == "nan"
    assert reading.num_passages == 2
    good = Reading(lm)
    good.read(TEXTS[:2])
    for name, tensor in good.state.tensors().items():
        torch.testing.assert_close(reading.state.tensors()[name], tensor)


@pytest.mark.parametrize("longest", [0, 2, 9])
def test_passages_are_read_in_blocks_of_whole_ones(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    most = longest * max(len(tokens_of(lm, [text])) for text in TEXTS)
    monkeypatch.setattr("ttt_adapt.adaptation.fast_weights.BLOCK_TOKENS", max(1, most))
    told: list[int] = []
    reading = Reading(lm)
    reading.read(TEXTS, progress=told.append)
    assert told == sorted(set(told)) and told[-1] == reading.num_passages == len(TEXTS)
    assert len(told) == {0: len(TEXTS), 2: 3, 9: 1}[longest]
    assert reading.num_tokens == len(tokens_of(lm, TEXTS))
    assert score(lm, reading.model) == pytest.approx(expected_score(lm, TEXTS), rel=1e-5)


def test_a_saved_state_predicts_the_same(lm: LanguageModel, tmp_path: Path) -> None:
    reading = Reading(lm)
    with pytest.raises(AdaptationError, match="nothing was read"):
        save_state(reading, lm, tmp_path / "state")
    reading.read(TEXTS)
    save_state(reading, lm, tmp_path / "state")
    assert score(lm, load_state(tmp_path / "state", lm)) == score(lm, reading.model)
    with pytest.raises(FingerprintMismatchError, match="another"):
        load_state(tmp_path / "state", make_lm(seed=7))
    with pytest.raises(ModelError, match="missing"):
        load_state(tmp_path / "missing", lm)


def test_models_with_attention_are_refused() -> None:
    lm = wrap_language_model(tiny_model(), tiny_tokenizer(), name="llama")
    with pytest.raises(ModelError, match=r"llama: expected a model whose layers are all TTT"):
        create_adapter(lm, AdaptationSettings(method="fast-weights"))
