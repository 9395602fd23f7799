"""What is learned, against the loops that anyone would write: deepcopy or PEFT, and torch.optim."""

import copy
import warnings
from typing import Any

import pytest
import torch

from ttt_adapt.adaptation import create_adapter, default_learning_rate
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.models import LanguageModel, wrap_language_model
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

ARCHITECTURES = ("llama", "gpt2")
TEXTS = [sample_text(i, num_words=24) for i in range(4)]
PROBE = torch.arange(2, 60)[None]
# One less than the positions: the loop reads a chunk with its last token, which GPT-2 must have one for.
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "precision": "float32", "max_length": 127}


def tiny(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> LanguageModel:
    model = tiny_model(architecture=architecture).to(dtype)
    return wrap_language_model(model, tiny_tokenizer(), name="tiny")


@torch.no_grad()
def predict(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=PROBE).logits.clone()
    return logits


def chunks_of(lm: LanguageModel, text: str, length: int) -> list[torch.Tensor]:
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [torch.tensor([[0, *ids[i : i + length]]]) for i in range(0, len(ids), length)]


def naive(
    lm: LanguageModel, model: Any, settings: AdaptationSettings, texts: list[str]
) -> tuple[torch.Tensor, list[float]]:
    """The plain loop: labels inside the model, torch's default optimizers."""
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(
        parameters, lr=settings.learning_rate or 3e-4, betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon, weight_decay=settings.weight_decay,
    )  # fmt: skip
    losses = []
    for text in texts:
        for chunk in chunks_of(lm, text, settings.max_length or lm.max_length):
            optimizer.zero_grad()
            loss = model(input_ids=chunk, labels=chunk).loss
            loss.backward()
            if settings.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
    return predict(model), losses


def adapt(
    lm: LanguageModel, settings: AdaptationSettings, texts: list[str], step: int = 99, seed: int = 0
) -> tuple[torch.Tensor, Any]:
    with create_adapter(lm, settings) as adapter:  # noqa: SIM117
        with adapter.episode([texts], steps=(step,), seed=seed) as episode:
            (found,) = [predict(point.model) for point in episode.points()]
    return found, episode.learned[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adamw", "weight_decay": 0.1, "max_grad_norm": 0.5},
        {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6},
        {"max_length": 50, "max_grad_norm": 1e3},
        {"epochs": 2, "learning_rate": 1e-2},
    ],
)
def test_full_equals_the_naive_loop(architecture: str, changes: dict[str, Any]) -> None:
    lm = tiny(architecture)
    settings = AdaptationSettings(**(SETTINGS | changes))
    expected, losses = naive(lm, copy.deepcopy(lm.model), settings, TEXTS * settings.epochs)
    found, learned = adapt(lm, settings, TEXTS)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4)
    assert learned.losses_nats == pytest.approx(losses, abs=1e-5)
    assert learned.stopped == ""
    num_tokens = sum(len(lm.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert learned.num_tokens == settings.epochs * num_tokens
    assert learned.elapsed_s > 0


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_fused_optimizer_equals_torch_step_for_step(optimizer: str) -> None:
    from ttt_adapt.adaptation.optimizer import make_optimizer
    from ttt_adapt.adaptation.working_copy import WorkingCopy

    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (33,), (16, 16)]
    reference = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    working = WorkingCopy(reference)
    working.load([r.detach() for r in reference])
    settings = AdaptationSettings(optimizer=optimizer, learning_rate=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
    ours = make_optimizer(working.views, settings)
    kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
    theirs = kind(reference, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False)
    for _ in range(50):
        for view, parameter in zip(working.views, reference, strict=True):
            view.grad = torch.randn(view.shape, generator=generator)
            parameter.grad = view.grad.clone()
        ours.step()
        theirs.step()
        for view, parameter in zip(working.views, reference, strict=True):
            torch.testing.assert_close(view, parameter.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("targets", [(), "named"])
def test_lora_equals_the_naive_peft_loop(architecture: str, targets: Any) -> None:
    import peft

    lm = tiny(architecture)
    names = ("c_attn",) if architecture == "gpt2" else ("q_proj", "down_proj")
    targets = names if targets else ()
    settings = AdaptationSettings(method="lora", lora_targets=targets, **SETTINGS)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM",
        fan_in_fan_out=architecture == "gpt2",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = peft.get_peft_model(copy.deepcopy(lm.model), config).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in wrapped.named_parameters():
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(parameter, a=5**0.5, generator=generator)
    expected, losses = naive(lm, wrapped, settings, TEXTS)
    found, learned = adapt(lm, settings, TEXTS, seed=5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4)
    assert learned.losses_nats == pytest.approx(losses, abs=1e-5)
    assert not torch.equal(found, predict(lm.model))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_autocast_stays_close_to_float32(method: str) -> None:
    lm = tiny()
    settings: dict[str, Any] = {"method": method, "learning_rate": 1e-3}
    exact, first = adapt(lm, AdaptationSettings(precision="float32", **settings), TEXTS)
    rounded, second = adapt(lm, AdaptationSettings(precision="bfloat16", **settings), TEXTS)
    assert not torch.equal(exact, rounded)
    assert second.losses_nats == pytest.approx(first.losses_nats, abs=0.02)


def test_lora_seed_decides_the_start() -> None:
    lm = tiny()
    settings = AdaptationSettings(method="lora", **SETTINGS)
    first, _ = adapt(lm, settings, TEXTS, seed=1)
    assert torch.equal(first, adapt(lm, settings, TEXTS, seed=1)[0])
    assert not torch.equal(first, adapt(lm, settings, TEXTS, seed=2)[0])


@pytest.mark.parametrize("method", ["full", "lora"])
def test_bfloat16_models_learn_in_float32(method: str) -> None:
    """A rate whose steps are lost in bfloat16's rounding still adds up in the masters."""
    lm = tiny(dtype=torch.bfloat16)
    settings = AdaptationSettings(method=method, learning_rate=2e-5, epochs=30)  # type: ignore[arg-type]
    before = {k: v.clone() for k, v in lm.model.state_dict().items()}
    found, learned = adapt(lm, settings, TEXTS[:1])
    assert learned.losses_nats[-1] < learned.losses_nats[0]
    assert not torch.equal(found, predict(lm.model))
    assert all(torch.equal(v, lm.model.state_dict()[k]) for k, v in before.items())


def test_learning_lowers_the_loss() -> None:
    _, learned = adapt(tiny(), AdaptationSettings(epochs=8, **SETTINGS), TEXTS[:1])
    assert learned.losses_nats[-1] < learned.losses_nats[0] - 0.1


def test_rate_left_open_is_the_small_models() -> None:
    lm = tiny("llama")
    open_, set_ = (
        adapt(lm, AdaptationSettings(learning_rate=rate, precision="float32"), ["some text"])
        for rate in (None, 3e-4)
    )
    assert torch.equal(open_[0], set_[0])
    assert [default_learning_rate(size) for size in (7_000_000, 124_000_000)] == [3e-4, 5e-5]
