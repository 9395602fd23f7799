"""What inner loops are equal to, in float64: linear attention, softmax attention, their own limits.

Shape legend: B images, N heads, T tokens, d head width, D width.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.vision.inner_loop import Decoder, Norm, mttt

BATCH, HEADS, TOKENS, WIDTH, DIM = 2, 3, 11, 4, 12


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture
def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values ``[B, N, T, d]``."""
    q, k, v = (draw(BATCH, HEADS, TOKENS, WIDTH, seed=seed) for seed in range(3))
    return q, k, v


def mlp_weights(seed: int = 5) -> tuple[torch.Tensor, ...]:
    hidden = 4 * WIDTH
    shapes = ((WIDTH, hidden), (hidden,), (hidden, WIDTH), (WIDTH,))
    return tuple(draw(HEADS, *shape, seed=seed + i, scale=0.4) for i, shape in enumerate(shapes))


def decoder(*, norm: bool = True, bias: bool = True) -> Decoder:
    return Decoder(
        draw(HEADS, WIDTH, DIM, seed=20, scale=0.5),
        draw(DIM, seed=21) if bias else None,
        Norm(1 + draw(HEADS, DIM, seed=22, scale=0.2), draw(HEADS, DIM, seed=23, scale=0.2))
        if norm
        else None,
    )


def feature_norm() -> Norm:
    return Norm(1 + draw(HEADS, WIDTH, seed=30, scale=0.2), draw(HEADS, WIDTH, seed=31, scale=0.2))


def test_one_step_from_zero_is_linear_attention(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """MTTT, equations 10, 11 and 16: also for tokens and a decoder, whose values are x Gᵀ."""
    q, k, v = heads
    wanted = torch.einsum("bhid,bhjd,bhje->bhie", q, k, v) / TOKENS
    torch.testing.assert_close(mttt(q, k, v), wanted)
    torch.testing.assert_close(mttt(q, k, v, closed_form=False), wanted)
    tokens, g = draw(BATCH, TOKENS, DIM, seed=9), decoder(norm=False, bias=False)
    values = torch.einsum("btD,hdD->bhtd", tokens, g.weight)
    wanted = torch.einsum("bhid,bhjd,bhje->bhie", q, k, values) / TOKENS
    torch.testing.assert_close(mttt(q, k, tokens, decoder=g), wanted)


def test_nadaraya_watson_is_softmax_attention(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """MTTT, equations 12 and 13: the mixer's attention without the 1/√d, token by token."""
    from ttt_adapt.vision.mixers import Attention

    layer = Attention(DIM, HEADS, scale=1.0).double()
    tokens = draw(BATCH, TOKENS, DIM, seed=4)

    def project(linear: torch.nn.Linear) -> torch.Tensor:
        found: torch.Tensor = linear(tokens).reshape(BATCH, TOKENS, HEADS, WIDTH)
        return found

    q, k, labels = project(layer.query), project(layer.key), project(layer.value)
    answers = torch.zeros_like(labels)
    for image in range(BATCH):
        for head in range(HEADS):
            for i in range(TOKENS):
                kernel = (k[image, :, head] @ q[image, i, head]).exp()
                weighted = kernel[:, None] * labels[image, :, head]
                answers[image, i, head] = weighted.sum(0) / kernel.sum()
    torch.testing.assert_close(layer(tokens), layer.out(answers.flatten(2)))


@pytest.mark.parametrize("strategy", ["full", "sgd"])
def test_no_steps_is_the_initial_model(
    strategy: Any, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    q, k, v = heads
    w1, b1, w2, b2 = mlp_weights()
    hidden = functional.gelu(q @ w1 + b1[:, None], approximate="tanh")
    found = mttt(q, k, v, (w1, b1, w2, b2), learner="mlp", strategy=strategy, steps=0)
    torch.testing.assert_close(found, hidden @ w2 + b2[:, None])
    assert not mttt(q, k, v, strategy=strategy, steps=0).any()


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_one_batch_of_sgd_is_the_full_batch(
    learner: Any, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    q, k, v = heads
    weights = mlp_weights() if learner == "mlp" else (draw(HEADS, WIDTH, WIDTH, seed=6),)
    full, sgd = (mttt(q, k, v, weights, learner=learner, strategy=name) for name in ("full", "sgd"))
    assert torch.equal(full, sgd)


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_permutation_equivariance(learner: Any) -> None:
    q, k = (draw(BATCH, HEADS, TOKENS, WIDTH, seed=seed) for seed in (1, 2))
    tokens = draw(BATCH, TOKENS, DIM, seed=3)
    weights = mlp_weights() if learner == "mlp" else (draw(HEADS, WIDTH, WIDTH, seed=6),)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(7))
    options: dict[str, Any] = {"learner": learner, "steps": 3, "decoder": decoder()}
    here = mttt(q, k, tokens, weights, **options)[:, :, order]
    there = mttt(q[:, :, order], k[:, :, order], tokens[:, order], weights, **options)
    torch.testing.assert_close(here, there)


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_inner_loss_falls_with_every_step(learner: Any) -> None:
    q, k = (draw(BATCH, HEADS, TOKENS, WIDTH, seed=seed) for seed in (1, 2))
    tokens = draw(BATCH, TOKENS, DIM, seed=3)
    weights = mlp_weights() if learner == "mlp" else (draw(HEADS, WIDTH, WIDTH, seed=6),)
    losses: list[torch.Tensor] = []
    mttt(
        q, k, tokens, weights, learner=learner, steps=4, eta=0.2, decoder=decoder(),
        recorder=losses.append,
    )  # fmt: skip
    assert losses[0].shape == (5, BATCH, HEADS)
    assert bool((losses[0].diff(dim=0) < 0).all())


def test_one_causal_mini_batch_is_causal_linear_attention(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Vision-TTT, theorem C.1: b = T, W0 = 0; its η = 1/2 of a loss without ½ is η = 1 here."""
    q, k, v = heads
    scores = torch.einsum("bhid,bhjd->bhij", q, k).tril()
    found = mttt(q, k, v, strategy="minibatch", mini_batch_size=TOKENS, normalizer="1")
    torch.testing.assert_close(found, scores @ v)
    # A mini-batch larger than the image is the image.
    found = mttt(q, k, v, strategy="minibatch", mini_batch_size=TOKENS + 5, normalizer="1")
    torch.testing.assert_close(found, scores @ v)


def test_online_is_linear_attention_to_adapted_values(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Vision-TTT, theorem C.2: b = 1: values v_s − W_(s−1) k_s, the delta rule."""
    q, k, v = heads
    weight = torch.zeros(BATCH, HEADS, WIDTH, WIDTH, dtype=torch.float64)
    adapted = torch.zeros_like(v)
    for s in range(TOKENS):
        adapted[:, :, s] = v[:, :, s] - torch.einsum("bhd,bhde->bhe", k[:, :, s], weight)
        weight = weight + k[:, :, s, :, None] * adapted[:, :, s, None, :]
    wanted = torch.einsum("bhid,bhjd->bhij", q, k).tril() @ adapted
    torch.testing.assert_close(mttt(q, k, v, strategy="online", normalizer="1"), wanted)
    batches_of_one = mttt(q, k, v, strategy="minibatch", mini_batch_size=1, normalizer="1")
    torch.testing.assert_close(batches_of_one, wanted)


@pytest.mark.parametrize("learner", ["linear", "mlp"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_operator_is_the_dual_form(
    learner: Any, size: int, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """With f(x) = x + LN(learner(x)) the kernels' operators compute what the plain loop does."""
    q, k, v = heads
    weights = mlp_weights()
    if learner == "linear":
        weights = draw(HEADS, WIDTH, WIDTH, seed=6), draw(HEADS, WIDTH, seed=7)
    rates = draw(BATCH, HEADS, TOKENS, seed=8).sigmoid()
    options: dict[str, Any] = {
        "learner": learner, "strategy": "minibatch", "mini_batch_size": size, "residual": True,
        "feature_norm": feature_norm(), "rates": rates, "eta": 0.3,
    }  # fmt: skip
    by_operator = mttt(q, k, v, weights, **options)
    in_order = mttt(q, k, v, weights, closed_form=False, **options)
    torch.testing.assert_close(by_operator, in_order)


def test_last_mini_batch_of_a_causal_loop_knows_the_whole_image(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """One causal mini-batch's last token is answered as by one full-batch step."""
    q, k, _ = heads
    tokens, weights = draw(BATCH, TOKENS, DIM, seed=3), mlp_weights()
    options: dict[str, Any] = {"learner": "mlp", "decoder": decoder()}
    full = mttt(q, k, tokens, weights, **options)
    causal = mttt(q, k, tokens, weights, strategy="minibatch", mini_batch_size=TOKENS, **options)
    torch.testing.assert_close(causal[:, :, -1], full[:, :, -1])
    # And the first sees itself alone: later tokens do not reach it.
    moved = tokens.clone()
    moved[:, 1:] += 1.0
    again = mttt(q, k, moved, weights, strategy="minibatch", mini_batch_size=TOKENS, **options)
    assert torch.equal(again[:, :, 0], causal[:, :, 0])
    assert not torch.allclose(again[:, :, -1], causal[:, :, -1])
