"""Token mixers: shapes, parameters, equivalences of the layers, SGD's order, losses, mistakes.

Shape legend: B images, T tokens, D width, N heads, d head width.
"""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.vision.inner_loop import mttt
from ttt_adapt.vision.mixers import MTTT, Attention, LinearAttention

DIM, HEADS, WIDTH = 12, 3, 4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def varied(layer: torch.nn.Module, seed: int = 0) -> Any:
    """In float64, no parameter at its initial zero or one."""
    torch.manual_seed(seed)
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


EVERY: list[tuple[Any, dict[str, Any]]] = [
    (Attention, {}),
    (LinearAttention, {}),
    (LinearAttention, {"feature_map": "elu"}),
    (MTTT, {}),
    (MTTT, {"preset": "paper", "steps": 3}),
    (MTTT, {"learner": "mlp"}),
    (MTTT, {"learner": "mlp", "strategy": "sgd", "steps": 2}),
    (MTTT, {"strategy": "minibatch", "mini_batch_size": 4, "initial": "learned"}),
    (MTTT, {"strategy": "online", "targets": "values", "rope_theta": 100.0}),
    (MTTT, {"strategy": "minibatch", "targets": "values", "residual": True, "feature_norm": True,
            "learner_bias": True, "gate": True, "initial": "learned"}),
    (MTTT, {"learner": "mlp", "strategy": "minibatch", "mini_batch_size": 4, "targets": "values",
            "residual": True, "feature_norm": True, "rope_theta": 10.0}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_every_mixer_learns_and_keeps_its_shape(
    kind: Any, options: dict[str, Any], num_tokens: int
) -> None:
    if options.get("strategy") == "sgd" and num_tokens == 1:
        options = {**options, "steps": 1}
    torch.manual_seed(0)
    layer = kind(DIM, HEADS, **options)
    tokens = torch.randn(2, num_tokens, DIM, requires_grad=True)
    before = tokens.detach().clone()
    out = layer(tokens)
    assert out.shape == tokens.shape and out.dtype == tokens.dtype
    out.square().sum().backward()
    assert torch.equal(tokens.detach(), before)
    gradients = [tokens.grad, *(parameter.grad for parameter in layer.parameters())]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    # Images do not see each other.
    with torch.no_grad():
        layer.eval()
        torch.testing.assert_close(layer(tokens[1:]), layer(tokens)[1:])
    again = kind(DIM, HEADS, **options)
    again.load_state_dict(layer.state_dict())


def test_mttt_linear_is_linear_attention() -> None:
    """Keys φ, queries ψ, values (x − c) Gᵀ, output h; with the normalizer of both presets."""
    for name in ("paper", "code"):
        layer = varied(MTTT(DIM, HEADS, preset=name))
        bias = layer.settings.bias
        linear = LinearAttention(DIM, HEADS, normalizer=layer.settings.normalizer).double()
        with torch.no_grad():
            for mine, theirs in (
                (layer.key, linear.key),
                (layer.query, linear.query),
                (layer.out, linear.out),
            ):
                theirs.weight.copy_(mine.weight)
                theirs.bias.copy_(mine.bias if bias else torch.zeros(DIM))
            g = layer.decoder_weight.reshape(DIM, DIM)
            linear.value.weight.copy_(g)
            linear.value.bias.copy_(-g @ layer.decoder_bias if bias else torch.zeros(DIM))
        tokens = draw(2, 9, DIM)
        torch.testing.assert_close(layer(tokens), linear(tokens))


def test_linear_attention_normalizers() -> None:
    layers = {
        name: varied(LinearAttention(DIM, HEADS, feature_map="elu", normalizer=name))
        for name in ("n", "n*d", "adaptive")
    }
    tokens = draw(2, 9, DIM)
    layer = layers["n"]
    for other in layers.values():
        other.load_state_dict(layer.state_dict())

    def heads(linear: torch.nn.Linear) -> torch.Tensor:
        found: torch.Tensor = linear(tokens).reshape(2, 9, HEADS, WIDTH)
        return found

    q, k = (torch.nn.functional.elu(heads(part)) + 1 for part in (layer.query, layer.key))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    for name, divisor in (
        ("n", 9.0),
        ("n*d", 9.0 * WIDTH),
        ("adaptive", scores.sum(-1, keepdim=True)),
    ):
        mixed = torch.einsum("bhij,bjhd->bihd", scores / divisor, heads(layer.value))
        torch.testing.assert_close(layers[name](tokens), layer.out(mixed.flatten(2)))
    assert LinearAttention(DIM, HEADS).normalizer == "n*d"
    assert LinearAttention(DIM, HEADS, feature_map="elu").normalizer == "adaptive"


def test_parameters_are_those_of_attention_and_w0() -> None:
    """The papers' tables: MTTT-Linear has attention's parameters, MTTT-MLP W0's and the norms' more."""

    def count(layer: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in layer.parameters())

    for dim, heads in ((192, 3), (384, 6)):
        attention = 4 * dim * dim + 4 * dim
        assert count(Attention(dim, heads)) == attention
        assert count(LinearAttention(dim, heads)) == attention
        assert count(MTTT(dim, heads)) == attention
        width = dim // heads
        inner = heads * (8 * width * width + 5 * width) + 2 * heads * dim
        assert count(MTTT(dim, heads, learner="mlp")) == attention + inner
    assert count(MTTT(384, 6, preset="paper")) == 4 * 384 * 384


def test_fixed_initial_weights_are_kept_but_not_learned() -> None:
    layer = MTTT(DIM, HEADS, learner="mlp", initial="fixed")
    assert not any(name.startswith("inner.") for name, _ in layer.named_parameters())
    assert {"inner.w1", "inner.b1", "inner.w2", "inner.b2"} <= set(layer.state_dict())


def test_sgd_s_order() -> None:
    """Evaluation: of the seed alone. Training: of torch's generator, or of the layer's."""
    layer = varied(MTTT(DIM, HEADS, learner="mlp", strategy="sgd", steps=3))
    tokens = draw(2, 9, DIM)
    layer.eval()
    state = torch.get_rng_state()
    evaluated = layer(tokens)
    assert torch.equal(evaluated, layer(tokens))
    assert torch.equal(state, torch.get_rng_state())
    other = varied(MTTT(DIM, HEADS, learner="mlp", strategy="sgd", steps=3, seed=1)).eval()
    assert not torch.equal(other(tokens), evaluated)

    layer.train()
    first, second = layer(tokens), layer(tokens)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(layer(tokens), first)
    layer.generator = torch.Generator().manual_seed(5)
    drawn = layer(tokens)
    assert not torch.equal(layer(tokens), drawn)
    layer.generator.manual_seed(5)
    assert torch.equal(layer(tokens), drawn)


def test_gradient_checkpointing_repeats_sgd_s_order() -> None:
    layer = varied(MTTT(DIM, HEADS, learner="mlp", strategy="sgd", steps=3)).train()
    gradients: list[torch.Tensor] = []
    for run in (layer, lambda tokens: checkpoint(layer, tokens, use_reentrant=False)):
        torch.manual_seed(3)
        tokens = draw(2, 9, DIM).requires_grad_()
        gradients += torch.autograd.grad(run(tokens).square().sum(), tokens)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_inner_losses_by_definition(learner: str) -> None:
    """½ mean ‖g(f(φx; W_t)) − x‖² / d of every head, summed; W_t from a layer of t steps."""
    layer = varied(MTTT(DIM, HEADS, learner=learner, steps=3, eta=0.5))
    tokens = draw(2, 9, DIM)
    losses = layer.inner_losses(tokens)
    assert losses.shape == (4,) and not losses.requires_grad
    recorded: list[torch.Tensor] = []
    layer.recorder = recorded.append
    out = layer(tokens)
    assert recorded[0].shape == (4, 2, HEADS)
    torch.testing.assert_close(recorded[0].sum(-1).mean(-1), losses)
    layer.recorder = None
    assert torch.equal(layer(tokens), out)

    def heads(linear: torch.nn.Linear) -> torch.Tensor:
        found: torch.Tensor = linear(tokens).reshape(2, 9, HEADS, WIDTH).transpose(1, 2)
        return found

    k, decoder = heads(layer.key), layer._decoder()
    assert decoder is not None
    for steps in range(4):
        # Answer the keys themselves, and reconstruct by hand.
        features = mttt(
            k, k, tokens, layer.inner.weights(), learner=layer.settings.learner, steps=steps,
            eta=0.5, normalizer="n*d", decoder=decoder,
        )  # fmt: skip
        shown = features @ decoder.weight + decoder.bias
        if decoder.norm is not None:
            shown = torch.nn.functional.layer_norm(shown, (DIM,), eps=1e-6)
            shown = shown * decoder.norm.weight[:, None] + decoder.norm.bias[:, None]
        wanted = 0.5 * (shown - tokens[:, None]).square().sum(-1).mean(-1) / WIDTH
        torch.testing.assert_close(losses[steps], wanted.sum(1).mean())


def test_positions_gate_and_causality() -> None:
    tokens = draw(1, 9, DIM)
    swapped = tokens[:, torch.tensor([1, 0, *range(2, 9)])]
    blind = varied(MTTT(DIM, HEADS, targets="values"))
    seeing = varied(MTTT(DIM, HEADS, targets="values", rope_theta=100.0))
    torch.testing.assert_close(blind(tokens)[:, 8], blind(swapped)[:, 8])
    assert not torch.allclose(seeing(tokens)[:, 8], seeing(swapped)[:, 8])
    gated = varied(MTTT(DIM, HEADS, targets="values", gate=True))
    mixed = blind_of(gated, tokens) * torch.nn.functional.gelu(gated.gate(tokens))
    torch.testing.assert_close(gated(tokens), gated.out(mixed))
    causal = varied(MTTT(DIM, HEADS, strategy="minibatch", mini_batch_size=4))
    changed = tokens.clone()
    changed[:, 5:] += 1.0
    assert torch.equal(causal(tokens)[:, :5], causal(changed)[:, :5])
    assert not torch.equal(causal(tokens)[:, 5:], causal(changed)[:, 5:])


def blind_of(layer: Any, tokens_BTD: torch.Tensor) -> torch.Tensor:
    """Heads' features before gate and output: linear attention by hand."""
    batch, count, _ = tokens_BTD.shape
    q, k, v = (
        part(tokens_BTD).reshape(batch, count, HEADS, WIDTH)
        for part in (layer.query, layer.key, layer.value)
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / (count * WIDTH)
    found: torch.Tensor = torch.einsum("bhij,bjhd->bihd", scores, v).flatten(2)
    return found


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: Attention(10, 3),
            ModelError,
            "multiple of num_heads, found dim 10 and num_heads 3",
        ),
        (lambda: MTTT(10, 3), ModelError, "multiple of num_heads"),
        (lambda: MTTT(9, 3, rope_theta=10.0), ModelError, "even head width"),
        (lambda: LinearAttention(8, 2, feature_map="relu"), ModelError, "identity or elu"),  # type: ignore[arg-type]
        (lambda: LinearAttention(8, 2, normalizer="d"), ModelError, "n, n\\*d or adaptive"),  # type: ignore[arg-type]
        (lambda: MTTT(8, 2, inner_steps=4), SettingsError, "inner_steps"),
        (lambda: MTTT(8, 2, preset="jax"), SettingsError, "a preset of paper, code"),
    ],
)
def test_mistakes_are_named(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()
