"""NaN and exploding losses end a query's learning, keep its last good weights, and are reported."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ttt_adapt.adaptation import Adapter, create_adapter
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.models import LanguageModel, wrap_language_model
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

METHODS = ("full", "lora")
TEXTS = [sample_text(i, num_words=16) for i in range(5)]
PROBE = torch.arange(2, 40)[None]


def tiny() -> LanguageModel:
    return wrap_language_model(tiny_model(), tiny_tokenizer(), name="tiny")


def adapter_of(lm: LanguageModel, method: str, **changes: Any) -> Adapter:
    options: dict[str, Any] = {"learning_rate": 1e-3, "precision": "float32", **changes}
    return create_adapter(lm, AdaptationSettings(method=method, **options))  # type: ignore[arg-type]


@torch.no_grad()
def predict(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=PROBE).logits.clone()
    return logits


def run(adapter: Adapter, steps: tuple[int, ...], queries: int = 1) -> tuple[list[Any], list[Any]]:
    with adapter.episode([TEXTS] * queries, steps=steps) as episode:
        found = [(p.step_reached, predict(p.model)) for p in episode.points()]
    return found, episode.learned


@contextmanager
def poisoned(lm: LanguageModel, call: int, *, value: float, backward: bool) -> Iterator[None]:
    """From learning's forward pass number ``call`` (from 0) on, logits or gradients are bad."""
    seen = -1

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        nonlocal seen
        if not torch.is_grad_enabled():
            return None
        seen += 1
        if seen < call:
            return None
        if backward:
            output.logits.register_hook(lambda gradient: gradient * value)
            return None
        output.logits = output.logits * value
        return output

    handle = lm.model.register_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.parametrize(
    ("method", "rate"), [("full", 1e3), ("full", 1e10), ("full", 1e30), ("lora", 1e30)]
)
def test_a_poisoned_rate_keeps_the_base(method: str, rate: float) -> None:
    lm = tiny()
    base = {name: value.clone() for name, value in lm.model.state_dict().items()}
    expected = predict(lm.model)
    found, (learned,) = run(adapter_of(lm, method, learning_rate=rate), (0, 1, 3))
    assert learned.stopped in ("nan", "exploded")
    assert [reached for reached, _ in found] == [0, 0, 0]
    for _, logits in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert all(torch.equal(v, base[k]) for k, v in lm.model.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_a_poisoned_last_step_is_noticed(method: str) -> None:
    """No later loss shows that the only step was bad: the last state is verified by itself."""
    found, (learned,) = run(adapter_of(tiny(), method, learning_rate=1e30), (1,))
    assert found[0][0] == 0
    assert learned.stopped in ("nan", "exploded")


@pytest.mark.parametrize("method", METHODS)
def test_nan_gradients_stop_before_they_are_applied(method: str) -> None:
    lm = tiny()
    clean, _ = run(adapter_of(lm, method), (1, 2))
    with poisoned(lm, 3, value=float("nan"), backward=True):
        found, (learned,) = run(adapter_of(lm, method), (1, 2, 4))
    assert learned.stopped == "nan"
    assert [reached for reached, _ in found] == [1, 2, 2]
    assert torch.equal(found[0][1], clean[0][1])
    assert torch.equal(found[1][1], clean[1][1])
    assert torch.equal(found[2][1], clean[1][1])
    assert len(learned.losses_nats) == 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "nan"), (1e6, "exploded")])
def test_a_bad_loss_takes_back_the_step_before_it(method: str, value: float, reason: str) -> None:
    """The weights that gave a bad loss are not good: those of the step before are."""
    lm = tiny()
    clean, _ = run(adapter_of(lm, method), (1, 2))
    with poisoned(lm, 3, value=value, backward=False):
        found, (learned,) = run(adapter_of(lm, method), (1, 3, 5))
    assert learned.stopped == reason
    assert [reached for reached, _ in found] == [1, 2, 2]
    assert torch.equal(found[0][1], clean[0][1])
    assert torch.equal(found[1][1], clean[1][1])
    assert torch.equal(found[2][1], clean[1][1])
    assert all(math.isfinite(loss) for loss in learned.losses_nats)


def test_a_bad_first_loss_learns_nothing() -> None:
    lm = tiny()
    expected = predict(lm.model)
    with poisoned(lm, 0, value=float("nan"), backward=False):
        found, (learned,) = run(adapter_of(lm, "full"), (0, 2))
    assert [reached for reached, _ in found] == [0, 0]
    assert torch.equal(found[1][1], expected)
    assert (learned.stopped, learned.losses_nats, learned.num_tokens) == ("nan", (), 0)


def test_an_easy_first_passage_makes_no_ordinary_one_an_explosion() -> None:
    """The limit is never below the cost of guessing every token alike."""
    lm = tiny()
    _, (learned,) = run(adapter_of(lm, "full", explosion_factor=1e-3), (5,))
    assert learned.stopped == "" or max(learned.losses_nats) > torch.log(torch.tensor(258.0))


@pytest.mark.parametrize("method", METHODS)
def test_the_next_query_starts_afresh(method: str) -> None:
    lm = tiny()
    adapter = adapter_of(lm, method)
    clean, _ = run(adapter, (3,))
    with poisoned(lm, 0, value=float("nan"), backward=True):
        _, (learned,) = run(adapter, (3,))
    assert learned.stopped == "nan"
    again, (learned,) = run(adapter, (3,))
    assert torch.equal(again[0][1], clean[0][1])
    assert learned.stopped == ""


def test_moments_that_last_stay_finite() -> None:
    lm = tiny()
    adapter = adapter_of(lm, "full", protocol="tttlm", learning_rate=1e10)
    run(adapter, (1, 3))
    assert adapter._lasting is not None
    for state in adapter._lasting.state.values():
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
