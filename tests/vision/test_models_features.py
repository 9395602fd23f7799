"""Feature maps of vision models, and what training them needs."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from ttt_adapt.errors import ModelError
from ttt_adapt.vision import VisionModel, VisionTransformer, create_model
from ttt_adapt.vision.models.features import resized_map

TINY: dict[str, Any] = {
    "dim": 16, "depth": 4, "num_heads": 2, "patch_size": 4, "image_size": (8, 16),
    "in_channels": 1, "num_classes": 3, "head_init": "normal",
}  # fmt: skip
KINDS = ("vision_ttt_tiny", "vit_tiny_attention", "vit_tiny_mttt_linear")


def tiny(name: str = "vision_ttt_tiny", seed: int = 0, **overrides: Any) -> VisionModel:
    torch.manual_seed(seed)
    return create_model(name, **{**TINY, **overrides}).eval()


def some_images(batch: int = 2, height: int = 8, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randn(batch, 1, height, width, generator=generator)


# Feature maps.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", ["mean", "double_token"])
def test_intermediates(kind: str, pool: str) -> None:
    model, images = tiny(kind, pool=pool), some_images(2, 11, 16)
    tokens, layout = model.embed(images)
    after = list(model.run_blocks(tokens, layout))
    final, maps = model.forward_intermediates(images)
    assert len(maps) == 4
    torch.testing.assert_close(final, model.forward_features(images))
    for found, expected in zip(maps, after, strict=True):
        assert found.shape == (2, 16, 3, 4)
        torch.testing.assert_close(found[:, :, 1, 2], layout.image_tokens(expected)[:, 6])
    normed = model.forward_intermediates(images, 1, norm=True, intermediates_only=True)
    torch.testing.assert_close(
        normed[0].flatten(2).transpose(1, 2), layout.image_tokens(model.forward_features(images))
    )
    lists = model.forward_intermediates(images, [-1, 0], output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(lists[1], layout.image_tokens(after[0]))
    torch.testing.assert_close(lists[0], layout.image_tokens(after[3]))
    early, _ = model.forward_intermediates(images, [1, 0], stop_early=True)
    torch.testing.assert_close(early, model.norm(after[1]))
    both = model.forward_intermediates(
        images, [2], return_prefix_tokens=True, intermediates_only=True
    )
    assert both[0][1].shape == (2, len(layout.class_positions), 16)
    torch.testing.assert_close(both[0][1], layout.class_tokens(after[2]))


def test_a_pyramid_for_detection_and_segmentation() -> None:
    model = tiny("vit_tiny_attention", patch_size=8)
    for height, width in ((64, 96), (50, 70)):
        images = some_images(1, height, width)
        maps = model.forward_pyramid(images)
        assert [tuple(m.shape) for m in maps] == [
            (1, 16, math.ceil(height / stride), math.ceil(width / stride))
            for stride in (4, 8, 16, 32)
        ]
    plain = model.forward_intermediates(images, [1], norm=True, intermediates_only=True)[0]
    torch.testing.assert_close(maps[1], plain)
    first = model.forward_intermediates(images, [0], norm=True, intermediates_only=True)[0]
    finer = functional.interpolate(first, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(maps[0], finer[:, :, :13, :18])
    chosen = model.forward_pyramid(images, indices=(-1, -1), strides=(16, 8))
    last = model.forward_intermediates(images, 1, norm=True, intermediates_only=True)[0]
    torch.testing.assert_close(chosen[1], last)


@pytest.mark.parametrize(("patch", "stride"), [(8, 4), (8, 16), (8, 12), (6, 16)])
def test_cells_of_a_pyramid_lie_where_they_should(patch: int, stride: int) -> None:
    """A map of where each patch's centre is: at another stride it is where each cell's is."""
    row = patch * (torch.arange(13) + 0.5)
    places = torch.stack([row[:, None].expand(13, 13), row.expand(13, 13)])[None]
    found = resized_map(places, 13 * patch, 13 * patch, patch, stride)
    count = math.ceil(13 * patch / stride)
    assert found.shape == (1, 2, count, count)
    expected, inner = stride * (torch.arange(count) + 0.5), slice(2, count - 3)
    torch.testing.assert_close(found[0, 0, inner, 3], expected[inner], rtol=0, atol=0.02 * stride)
    torch.testing.assert_close(found[0, 1, 3, inner], expected[inner], rtol=0, atol=0.02 * stride)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m.forward_intermediates(x, [4]), "expected blocks of -4 to 3, found 4"),
        (lambda m, x: m.forward_intermediates(x, 5), "expected 1 to 4 last blocks, found 5"),
        (lambda m, x: m.forward_intermediates(x, []), "at least one block"),
        (lambda m, x: m.forward_intermediates(x, output_fmt="NHWC"), "NCHW, NLC, found 'NHWC'"),
        (lambda m, x: m.forward_pyramid(x, [0], (4, 8)), "each of the 2 strides, found 1 indices"),
        (lambda m, x: m.forward_pyramid(x, strides=(0,)), "strides of at least 1 pixel"),
    ],
)
def test_mistakes_with_feature_maps(call: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        call(tiny(), some_images())


# Training.


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(kind: str) -> None:
    images = some_images()
    found = []
    for enable in (False, True):
        model = tiny(kind, drop_path=0.3).train()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        model(images).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_checkpointing_refuses_an_order_that_it_would_draw_twice() -> None:
    model = tiny("vit_tiny_mttt_mlp", strategy="sgd", steps=2)
    assert isinstance(model, VisionTransformer)
    block: Any = model.blocks[1]
    block.mixer.generator = torch.Generator()
    model.set_grad_checkpointing()
    with pytest.raises(ModelError, match=r"blocks.1.mixer: expected no generator"):
        model.train()(some_images())
    with torch.no_grad():
        model(some_images())


def test_drop_path_leaves_out_whole_branches() -> None:
    model = tiny(drop_path=0.5, depth=3)
    blocks: Any = model.blocks
    assert [block.drop_path.rate for block in blocks] == [0.0, 0.25, 0.5]
    drop = blocks[2].drop_path.train()
    out = drop(torch.ones(2000, 2, 3)).flatten(1)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert ((out == 0).all(1) | (out == 2).all(1)).all()
    assert out.mean() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(drop.eval()(out), out)


def test_what_is_not_decayed() -> None:
    block = "blocks.0.mixer"
    assert {n for n in tiny(depth=1, pool="head_token").no_weight_decay() if "back" not in n} == {
        "positions.table",
        "class_tokens.weight",
        f"{block}.initial.forth.bias",
        f"{block}.directions.forth.token_scale_offset",
        f"{block}.directions.forth.norm_weight",
        f"{block}.directions.forth.norm_bias",
    }
    assert tiny("vit_tiny_attention").no_weight_decay() == set()
