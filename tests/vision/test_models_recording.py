"""Inner losses and gradients of a model's layers, against autograd through the inner loop."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.vision import VisionModel, create_model, record_inner_loops
from ttt_adapt.vision.models import StepLosses, TokenLosses
from ttt_adapt.vision.models.inner_learner import InitialState, InnerLearner, InnerTokens
from ttt_adapt.vision.models.layout import TokenLayout

TINY: dict[str, Any] = {
    "dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "image_size": (8, 20),
    "in_channels": 1, "num_classes": 3,
}  # fmt: skip


def tiny(name: str = "vision_ttt_tiny", **overrides: Any) -> VisionModel:
    torch.manual_seed(0)
    model = create_model(name, **{**TINY, **overrides}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def slow_losses(
    learner: InnerLearner, tokens: InnerTokens, initial: InitialState
) -> tuple[torch.Tensor, torch.Tensor]:
    """By autograd, image by image, head by head, token by token."""
    batch, length, heads, width = tokens.k.shape
    losses, norms = (torch.zeros(batch, heads, length) for _ in range(2))
    scale = learner.token_scale()
    for image in range(batch):
        for head in range(heads):
            weight, bias = initial.weight[head], initial.bias[head]
            for first in range(0, length, learner.mini_batch_size):
                fast = weight.detach().requires_grad_(), bias.detach().requires_grad_()
                total = torch.zeros_like(weight), torch.zeros_like(bias)
                for t in range(first, min(first + learner.mini_batch_size, length)):
                    k, v = tokens.k[image, t, head], tokens.v[image, t, head]
                    affine = learner.norm_weight[head], learner.norm_bias[head]
                    with torch.enable_grad():
                        z = k @ fast[0] + fast[1]
                        error = functional.layer_norm(z, (width,), *affine, 1e-6) - (v - k)
                        loss = 0.5 * error.square().sum()
                        found = torch.autograd.grad(loss, fast)
                    losses[image, head, t] = loss.detach()
                    norms[image, head, t] = found[0].norm()
                    rate = tokens.lr[image, t, head]
                    total = total[0] + rate * found[0], total[1] + rate * found[1]
                weight, bias = weight - scale[-1] * total[0], bias - scale[-1] * total[1]
    return losses, norms


@pytest.mark.parametrize("pool", ["mean", "mid_token"])
def test_losses_by_token(pool: str) -> None:
    model = tiny(mini_batch_size=4, pool=pool)
    images = torch.randn(2, 1, 8, 20)
    before = model(images)
    seen: list[tuple[InnerTokens, InitialState, TokenLayout]] = []
    second: Any = model.blocks[1]
    learner = second.mixer.directions["back"]
    learner.probe = lambda _, tokens, initial, layout: seen.append((tokens, initial, layout))
    model(images)
    learner.probe = None
    with record_inner_loops(model) as recording:
        assert torch.equal(model(images), before)
    assert [(r.block, r.direction) for r in recording.layers if isinstance(r, TokenLosses)] == [
        (0, "forth"), (0, "back"), (1, "forth"), (1, "back"),
    ]  # fmt: skip
    record = recording.layers[3]
    assert isinstance(record, TokenLosses)
    assert record.name == "blocks.1.mixer.directions.back"
    tokens, initial, layout = seen[0]
    with torch.no_grad():
        losses, norms = slow_losses(learner, tokens, initial)
    # Recorded in the image's order; the loop itself ran from the last token to the first.
    torch.testing.assert_close(record.losses, losses.flip(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(record.gradient_norms, norms.flip(2), rtol=1e-4, atol=1e-5)
    assert record.layout == layout.reversed() == model.embed(images)[1]


def test_losses_by_step() -> None:
    model, images = tiny("vit_tiny_mttt_mlp", steps=3), torch.randn(2, 1, 8, 20)
    with record_inner_loops(model) as recording:
        model(images)
    assert [record.block for record in recording.layers] == [0, 1]
    tokens, _ = model.embed(images)
    blocks: Any = model.blocks
    for record, block in zip(recording.layers, blocks, strict=True):
        assert isinstance(record, StepLosses)
        assert record.losses.shape == (4, 2, 2)
        expected = block.mixer.inner_losses(block.norm1(tokens))
        torch.testing.assert_close(record.mean_losses, expected)
        assert (record.mean_losses.diff() < 0).all()
        tokens = block(tokens, None)


def test_recording_is_undone_and_sees_each_call_once() -> None:
    model = tiny().train()
    model.set_grad_checkpointing()
    with record_inner_loops(model) as recording:
        model(torch.randn(1, 1, 8, 20)).sum().backward()
        assert len(recording.layers) == 4
        recording.clear()
        model(torch.randn(1, 1, 8, 20))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(1, 1, 8, 20))
    assert len(recording.layers) == 8
    assert all(record.losses.dtype == torch.float32 for record in recording.layers)
    assert model.grad_checkpointing
    model(torch.randn(1, 1, 8, 20))
    assert len(recording.layers) == 8


def test_a_model_without_inner_loops() -> None:
    with (
        pytest.raises(ModelError, match="vit_tiny_attention: expected a model with inner loops"),
        record_inner_loops(tiny("vit_tiny_attention")),
    ):
        pass
