"""Episodes: the base model is back bit for bit, however an episode ends; no query sees another."""

import gc
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ttt_adapt.adaptation import Adapter, create_adapter
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.errors import AdaptationError, ModelError, SettingsError
from ttt_adapt.models import LanguageModel, wrap_language_model
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

METHODS = ("full", "lora")
ARCHITECTURES = ("llama", "gpt2")
TEXTS = [sample_text(i, num_words=20) for i in range(3)]
PROBE = torch.arange(2, 40)[None]


def tiny(architecture: str = "llama") -> LanguageModel:
    model = tiny_model(architecture=architecture)
    return wrap_language_model(model, tiny_tokenizer(), name="tiny")


def adapter_of(lm: LanguageModel, method: str = "full", **changes: Any) -> Adapter:
    options: dict[str, Any] = {"learning_rate": 1e-3, "precision": "float32", **changes}
    return create_adapter(lm, AdaptationSettings(method=method, **options))  # type: ignore[arg-type]


@torch.no_grad()
def predict(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=PROBE).logits.clone()
    return logits


def trace(lm: LanguageModel) -> tuple[Any, ...]:
    """Everything an episode must leave as it was: bytes, memory, modules, flags, attributes."""
    model = lm.model
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *model.buffers()):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return (
        digest.hexdigest(),
        [(name, p.data_ptr(), p.requires_grad, p.grad) for name, p in model.named_parameters()],
        [(name, id(module)) for name, module in model.named_modules()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        sorted(vars(model)),
        model.config.to_dict(),
        model.config._attn_implementation,
        model.training,
        model.lm_head.weight is model.get_input_embeddings().weight,
    )


def points(adapter: Adapter, texts: Any, steps: tuple[int, ...], seed: int = 0) -> list[Any]:
    """Requested step, step reached and predictions of every point."""
    with adapter.episode(texts, steps=steps, seed=seed) as episode:
        return [(p.query, p.step, p.step_reached, predict(p.model)) for p in episode.points()]


@pytest.mark.parametrize("method", ["none", "in-context", *METHODS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_base_is_back_after_success_and_close(method: str, architecture: str) -> None:
    lm = tiny(architecture)
    before, base = trace(lm), predict(lm.model)
    adapter = adapter_of(lm, method)
    assert trace(lm) == before
    found = points(adapter, [TEXTS, TEXTS[:1]], (0, 1, 3))
    assert trace(lm) == before
    adapter.close()
    adapter.close()
    assert trace(lm) == before
    assert [point[:2] for point in found] == [(q, s) for q in (0, 1) for s in (0, 1, 3)]
    learns = method in METHODS
    assert [torch.equal(point[3], base) for point in found] == 2 * [True, not learns, not learns]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_base_is_back_after_an_exception_between_steps(method: str, architecture: str) -> None:
    lm = tiny(architecture)
    before, adapter = trace(lm), adapter_of(lm, method)
    with (
        pytest.raises(RuntimeError, match="from the consumer"),
        adapter.episode([TEXTS], steps=(0, 2, 3)) as episode,
    ):
        for point in episode.points():
            if point.step == 2:
                assert trace(lm) != before
                raise RuntimeError("from the consumer")
    assert trace(lm) == before
    assert len(points(adapter, [TEXTS], (1,))) == 1


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("calls", [1, 4])
def test_base_is_back_after_an_exception_in_the_middle_of_a_backward_pass(
    kind: type[BaseException], method: str, calls: int
) -> None:
    lm = tiny()
    before, adapter = trace(lm), adapter_of(lm, method)
    left = calls

    def interrupt(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise kind("in the middle")

    handle = lm.model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: output.register_hook(interrupt) and None
    )
    with (
        pytest.raises(kind, match="in the middle"),
        adapter.episode([TEXTS], steps=(2, 3)) as episode,
    ):
        for point in episode.points():
            assert point.step in (2, 3)
    handle.remove()
    assert trace(lm) == before
    assert len(points(adapter, [TEXTS], (1,))) == 1


def test_base_is_back_after_ctrl_c() -> None:
    """A real SIGINT, in the middle of learning, in a process of its own."""
    script = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_episode as t
for method in t.METHODS:
    lm = t.tiny()
    before, adapter = t.trace(lm), t.adapter_of(lm, method, epochs=10**5)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with adapter.episode([t.TEXTS], steps=(1, 10**5)) as episode:
            for point in episode.points():
                t.predict(point.model)
                assert t.trace(lm) != before
                timer.start()
    except KeyboardInterrupt:
        print(episode.learned[0].num_tokens > 0, t.trace(lm) == before)
        print(len(t.points(adapter, [t.TEXTS], (1,))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin", "PYTHONPATH": "."},
    )
    assert done.stdout == 2 * "True True\n1\n", done.stderr[-2000:]


@pytest.mark.parametrize("method", METHODS)
def test_abandoned_generators(method: str) -> None:
    lm = tiny()
    before, adapter = trace(lm), adapter_of(lm, method)
    with adapter.episode([TEXTS, TEXTS], steps=(1, 2)) as episode:
        half_way = episode.points()
        next(half_way)
    assert trace(lm) == before
    with pytest.raises(AdaptationError, match="the episode is over; consume its points within"):
        next(half_way)
    assert trace(lm) == before
    assert episode.learned[0] is not None
    assert episode.learned[1] is None


def test_a_point_left_open_does_not_survive_into_the_next_episode() -> None:
    lm = tiny()
    adapter = adapter_of(lm)
    expected = points(adapter, [TEXTS], (1, 3))
    with adapter.episode([TEXTS[::-1]], steps=(2, 3)) as episode:
        next(episode.points())
    for first, second in zip(points(adapter, [TEXTS], (1, 3)), expected, strict=True):
        assert torch.equal(first[3], second[3])


def test_misuse_is_refused() -> None:
    lm = tiny()
    adapter, other = adapter_of(lm), adapter_of(lm, "lora")
    with adapter.episode([TEXTS], steps=(1,)) as episode:
        for nested in (adapter, other):
            with (
                pytest.raises(AdaptationError, match="tiny is in another episode; leave that one"),
                nested.episode([TEXTS], steps=(1,)),
            ):
                pass
        with pytest.raises(AdaptationError, match="expected no open episode on close"):
            adapter.close()
        list(episode.points())
        with pytest.raises(AdaptationError, match="found a second call"):
            episode.points()
    with pytest.raises(AdaptationError, match="found the episode is over"):
        episode.points()
    with pytest.raises(AdaptationError, match="can be entered once"), episode:
        pass
    with pytest.raises(AdaptationError, match="found the context not entered"):
        adapter.episode([TEXTS], steps=(1,)).points()
    for steps in ((), (1, 1), (2, 1), (-1, 2)):
        with pytest.raises(SettingsError, match="expected steps that ascend from 0"):
            adapter.episode([TEXTS], steps=steps)
    with pytest.raises(SettingsError, match="found one string"):
        adapter.episode(TEXTS, steps=(1,))
    adapter.close()
    with pytest.raises(AdaptationError, match="this adapter is closed"):
        adapter.episode([TEXTS], steps=(1,))
    lm.model.train()
    with (
        pytest.raises(ModelError, match="found train mode; call model.eval"),
        other.episode([TEXTS], steps=(1,)),
    ):
        pass


def test_an_episode_that_was_dropped_blocks_nobody() -> None:
    lm = tiny()
    adapter = adapter_of(lm)
    episode = adapter.episode([TEXTS], steps=(1,))
    episode.__enter__()
    del episode
    gc.collect()
    assert len(points(adapter, [TEXTS], (1,))) == 1


@pytest.mark.parametrize("method", METHODS)
def test_queries_do_not_see_each_other(method: str) -> None:
    """A batch equals its queries one by one, in any order, on any adapter."""
    lm = tiny()
    batch = [TEXTS, TEXTS[::-1], TEXTS[:1], TEXTS]
    together = points(adapter_of(lm, method), batch, (0, 1, 3), seed=4)
    single = adapter_of(lm, method)
    alone = {q: points(single, [batch[q]], (0, 1, 3), seed=4) for q in (3, 2, 1, 0)}
    for query, step, reached, logits in together:
        expected = alone[query][(0, 1, 3).index(step)]
        assert reached == expected[2]
        assert torch.equal(logits, expected[3])


@pytest.mark.parametrize("method", METHODS)
def test_tttlm_lets_moments_leak_but_not_weights(method: str) -> None:
    lm = tiny()
    before = trace(lm)
    leaky = adapter_of(lm, method, protocol="tttlm")
    first = points(leaky, [TEXTS, TEXTS], (0, 3))
    assert torch.equal(first[0][3], first[2][3])
    assert not torch.equal(first[1][3], first[3][3])
    assert trace(lm) == before
    clean = points(adapter_of(lm, method, optimizer="adamw"), [TEXTS, TEXTS], (0, 3))
    assert torch.equal(clean[1][3], first[1][3])
    assert torch.equal(clean[1][3], clean[3][3])


@pytest.mark.parametrize("method", METHODS)
def test_intermediate_points_do_not_change_later_ones(method: str) -> None:
    adapter = adapter_of(tiny(), method)
    every = points(adapter, [TEXTS], (0, 1, 2, 3))
    assert torch.equal(every[-1][3], points(adapter, [TEXTS], (3,))[0][3])
    assert torch.equal(every[1][3], points(adapter, [TEXTS[:1]], (9,))[0][3])


def test_the_callers_grad_mode_does_not_matter() -> None:
    adapter = adapter_of(tiny())
    expected = points(adapter, [TEXTS], (2, 3))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for first, second in zip(points(adapter, [TEXTS], (2, 3)), expected, strict=True):
                assert torch.equal(first[3], second[3])


def test_steps_beyond_the_data_and_empty_passages() -> None:
    adapter = adapter_of(tiny())
    found = points(adapter, [[TEXTS[0], "", TEXTS[1]], [], ["", ""]], (0, 1, 2, 3, 9))
    assert [p[2] for p in found] == [0, 1, 2, 3, 3, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2]
    assert torch.equal(found[1][3], found[2][3])
    assert torch.equal(found[3][3], found[4][3])
    assert torch.equal(found[14][3], found[0][3])


def test_in_context_prefixes() -> None:
    lm = tiny()
    with adapter_of(lm, "in-context").episode([["aa", "bb", "cc"]], steps=(0, 1, 2, 9)) as episode:
        found = [(p.step_reached, lm.tokenizer.decode(list(p.prefix))) for p in episode.points()]
    assert found == [(0, ""), (1, "aa\n\n"), (2, "bb\n\naa\n\n"), (3, "cc\n\nbb\n\naa\n\n")]
    assert episode.learned == [None]
    with adapter_of(lm, "in-context").episode([["b" * 900, "a"]], steps=(2,)) as episode:
        (point,) = episode.points()
    assert len(point.prefix) == lm.max_length // 2


def test_frozen_weights_stay_frozen_and_user_gradients_stay() -> None:
    lm = tiny()
    frozen = lm.model.model.embed_tokens.weight
    frozen.requires_grad_(False)
    other = lm.model.model.norm.weight
    other.grad = torch.ones_like(other)
    with adapter_of(lm).episode([TEXTS], steps=(2,)) as episode:
        for _ in episode.points():
            assert lm.model.model.embed_tokens.weight is frozen
            assert not torch.equal(other.data, torch.ones_like(other))
    assert torch.equal(other.grad, torch.ones_like(other))
    assert not frozen.requires_grad


def test_models_that_cannot_be_learned_faithfully() -> None:
    for method in METHODS:
        lm = tiny()
        lm.model.to(torch.float16)
        with pytest.raises(ModelError, match=r"in float32 or bfloat16 to learn, found torch.float"):
            adapter_of(lm, method)
    lm = tiny()
    lm.model.requires_grad_(False)
    with pytest.raises(ModelError, match="no weight requires a gradient"):
        adapter_of(lm)
    lm = tiny()
    layers = lm.model.model.layers
    layers[0].mlp.up_proj.weight = torch.nn.Parameter(layers[1].mlp.up_proj.weight.data)
    with pytest.raises(ModelError, match="two parameters share memory"):
        adapter_of(lm)


@pytest.mark.parametrize("targets", [("no_such_layer",), ("embed_tokens",)])
def test_lora_targets_that_do_not_fit(targets: tuple[str, ...]) -> None:
    lm = tiny()
    before = trace(lm)
    with pytest.raises(SettingsError, match="lora_targets"):
        adapter_of(lm, "lora", lora_targets=targets)
    assert trace(lm) == before


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(SettingsError, match="max_length must be at most 128 for tiny, found 129"):
        adapter_of(tiny(), max_length=129)
