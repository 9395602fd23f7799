"""Looking inside: receptive fields, gradients and losses against plain autograd; pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from ttt_adapt.errors import ImageError, ModelError
from ttt_adapt.vision.data import ImageDataSettings, sample_image
from ttt_adapt.vision.explaining import (
    ReceptiveField,
    effective_receptive_field,
    explain,
    gradient_maps,
    inner_losses,
    top_share,
)
from ttt_adapt.vision.explaining.pictures import history_picture, overlay
from ttt_adapt.vision.models import create_model
from ttt_adapt.vision.models.inner_learner import InnerLearner

TINY = {"dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "num_classes": 3}


def model_of(name: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    return create_model(name, image_size=16, **{**TINY, **overrides})


def images(count: int = 2, size: tuple[int, int] = (16, 16)) -> torch.Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["vision_ttt_tiny", "vit_tiny_attention", "vit_tiny_mttt_mlp"])
def test_the_receptive_field_is_the_gradient_of_the_centre(name: str) -> None:
    model, inputs = model_of(name), images()
    found = effective_receptive_field(model, inputs, batch_size=1)
    expected = torch.zeros(16, 16)
    for image in inputs:
        leaf = image[None].clone().requires_grad_()
        tokens, layout = model.embed(leaf)
        for block in model.blocks:
            tokens = block(tokens, layout)
        tokens[0, 2 * 4 + 2].sum().backward()
        assert leaf.grad is not None
        expected += leaf.grad[0].abs().sum(0)
    assert np.allclose(found.contributions_HW, expected / 2, rtol=1e-4, atol=1e-9)
    assert found.centre == (10.0, 10.0) and found.num_images == 2
    assert model.training


def test_a_model_without_mixing_sees_one_patch() -> None:
    found = effective_receptive_field(model_of("vit_tiny_attention", mixer="none"), images())
    seen = found.contributions_HW > 0
    assert seen[8:12, 8:12].all() and seen.sum() == 16
    assert not found.is_global()
    assert found.side_share(1.0) <= 0.5


def test_one_direction_sees_what_came_before() -> None:
    """The route of the paper's figure 8: one direction, both directions."""
    one = effective_receptive_field(model_of("vision_ttt_tiny", dual=False, dwconv=False), images())
    rows = one.contributions_HW.reshape(4, 4, 16).sum(1)
    assert (rows[:2] > 0).all() and (rows[3] == 0).all()
    both = effective_receptive_field(model_of("vision_ttt_tiny", dwconv=False), images())
    assert both.is_global()


@given(height=st.integers(2, 9), width=st.integers(2, 9), seed=st.integers(0, 99))
def test_the_side_share_by_search(height: int, width: int, seed: int) -> None:
    values = np.random.default_rng(seed).random((height, width))
    field = ReceptiveField(values, (height / 2, width / 2), 1)
    rows = np.abs(np.arange(height) + 0.5 - height / 2) / (height / 2)
    columns = np.abs(np.arange(width) + 0.5 - width / 2) / (width / 2)
    for fraction in (0.1, 0.5, 1.0):
        side = field.side_share(fraction)
        inside = (rows[:, None] <= side + 1e-9) & (columns[None] <= side + 1e-9)
        assert values[inside].sum() >= fraction * values.sum() - 1e-9
        smaller = (rows[:, None] < side - 1e-9) & (columns[None] < side - 1e-9)
        assert values[smaller].sum() < fraction * values.sum()
    with pytest.raises(ImageError, match="fraction: expected more than 0"):
        field.side_share(0.0)


@pytest.mark.parametrize("size", [(16, 16), (12, 23)])
def test_gradient_maps_are_gradients(size: tuple[int, int]) -> None:
    """Equation 6 by autograd, token by token, for the first mini-batch of the first block."""
    model = model_of("vision_ttt_tiny", dual=False, dwconv=False, mini_batch_size=5).eval()
    inputs = images(1, size)
    found = gradient_maps(model, inputs)
    h, w = -(-size[0] // 4), -(-size[1] // 4)
    assert [m.block for m in found] == [0, 1] and found[0].magnitudes_Bhw.shape == (1, h, w)

    tokens, _ = model.embed(inputs)
    normed = model.blocks[0].norm1(tokens)
    learner = model.blocks[0].mixer.directions["forth"]
    assert isinstance(learner, InnerLearner)
    inner = learner.inner_tokens(normed)
    initial = model.blocks[0].mixer.initial_of("forth")
    weight = initial.weight.detach().clone().requires_grad_()
    for token in range(5):
        k, v = inner.k[0, token], inner.v[0, token]
        z = torch.einsum("ni,nij->nj", k, weight) + initial.bias
        normalised = (z - z.mean(-1, keepdim=True)) / torch.sqrt(
            z.var(-1, keepdim=True, unbiased=False) + 1e-6
        )
        error = normalised * learner.norm_weight + learner.norm_bias - (v - k)
        (gradient,) = torch.autograd.grad(0.5 * error.square().sum(), weight, retain_graph=True)
        assert found[0].magnitudes_Bhw.flatten()[token] == pytest.approx(
            float(gradient.norm()), rel=1e-3
        )


def test_both_directions_count_alike() -> None:
    model = model_of("vision_ttt_tiny")
    mean = gradient_maps(model, images())[0].magnitudes_Bhw
    assert mean.shape == (2, 4, 4) and (mean > 0).all()


@given(
    height=st.integers(1, 8),
    width=st.integers(1, 8),
    share=st.sampled_from([0.01, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_top_share_is_the_top(height: int, width: int, share: float, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 5, (height, width)).astype(float)
    chosen = top_share(values, share)
    assert chosen.sum() == max(1, int(share * values.size + 0.5))
    if not chosen.all():
        assert values[chosen].min() >= values[~chosen].max()
        tied = values[chosen].min()
        places = np.flatnonzero(values.ravel() == tied)
        taken = chosen.ravel()[places]
        assert (np.sort(taken)[::-1] == taken).all(), "of equal ones the first"
    with pytest.raises(ImageError, match="share: expected more than 0"):
        top_share(values, 1.5)


def test_inner_losses_of_steps_fall() -> None:
    model = model_of("vit_tiny_mttt_mlp", steps=3)
    lines = inner_losses(model, images())
    assert [(line.block, line.kind) for line in lines] == [(0, "steps"), (1, "steps")]
    for line in lines:
        assert line.losses.shape == (4,) and (np.diff(line.losses) < 0).all()


def test_inner_losses_of_tokens() -> None:
    lines = inner_losses(model_of("vision_ttt_tiny", pool="mid_token"), images())
    assert [(line.block, line.direction) for line in lines] == [
        (0, "forth"), (0, "back"), (1, "forth"), (1, "back"),
    ]  # fmt: skip
    assert all(line.kind == "tokens" and line.losses.shape == (16,) for line in lines)
    causal = inner_losses(
        model_of("vit_tiny_mttt_linear", strategy="minibatch", mini_batch_size=4), images()
    )
    assert causal[0].kind == "tokens" and causal[0].losses.shape == (16,)


def test_models_without_an_inner_loop() -> None:
    with pytest.raises(ModelError, match="found none in it"):
        inner_losses(model_of("vit_tiny_attention"), images())
    with pytest.raises(ModelError, match="expected a Vision-TTT model for maps"):
        gradient_maps(model_of("vit_tiny_mttt_linear"), images())
    with pytest.raises(ModelError, match="expected a vision model, found Linear"):
        inner_losses(nn.Linear(2, 2), images())
    with pytest.raises(ImageError, match="at least one image"):
        effective_receptive_field(model_of("vision_ttt_tiny"), images()[:0])


def test_overlays_dim_what_is_not_chosen() -> None:
    image = np.full((6, 7, 3), 200, dtype=np.uint8)
    chosen = np.array([[True, False], [False, False]])
    found = overlay(image, chosen)
    assert (found[:3, :4] == 200).all() and (found[3:] == 36).all() and (found[:, 4:] == 36).all()


@pytest.mark.parametrize("name", ["vision_ttt_tiny", "vit_tiny_mttt_mlp", "vit_tiny_attention"])
def test_pictures_of_a_real_image(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    data = ImageDataSettings(path="x", image_size=(24, 32))
    photographs = [sample_image("chelsea"), sample_image("china")]
    found = explain(model, photographs, data, tmp_path, compare_untrained=True, seed=3)
    names = {path.name for path in found.files}
    expected = {"receptive-field.png", "explanation.json"}
    expected |= {"inner-losses.png"} if name != "vit_tiny_attention" else set()
    expected |= {"gradient-map.png"} if name == "vision_ttt_tiny" else set()
    assert names == expected
    for path in found.files:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert picture.format == "PNG" and picture.mode == "P" and picture.width > 200
                assert len(picture.getcolors() or []) > 8
    numbers = json.loads((tmp_path / "explanation.json").read_text())
    assert set(numbers["receptive_field"]) == {"trained", "untrained"}
    assert list(found.receptive_fields) == ["untrained", "trained"]
    before = {path.name: path.read_bytes() for path in found.files}
    explain(model, photographs, data, tmp_path, compare_untrained=True, seed=3)
    assert {path.name: path.read_bytes() for path in found.files} == before


def test_wrong_blocks_are_named(tmp_path: Path) -> None:
    data = ImageDataSettings(path="x", image_size=(16, 16))
    with pytest.raises(ImageError, match="block: expected -2 to 1, found 5"):
        explain(model_of("vision_ttt_tiny"), [sample_image("china")], data, tmp_path, block=5)
    with pytest.raises(ImageError, match="at least one image"):
        explain(model_of("vision_ttt_tiny"), [], data, tmp_path)


def test_the_history_of_inner_losses_is_drawn(tmp_path: Path) -> None:
    rows = [{"step": s, "layers": [[3.0, 2.0 / (1 + s)], [4.0, 1.0]]} for s in range(3)]
    path = history_picture(rows, tmp_path / "history.png")
    with Image.open(path) as picture:
        assert picture.size[0] > 400
