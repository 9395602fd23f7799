"""Vision models by name: any height and width, positions, classification heads, feature maps."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import ttt_adapt.vision
from ttt_adapt.errors import MissingDependencyError, ModelError, SettingsError
from ttt_adapt.vision import VisionModel, create_model, list_models
from ttt_adapt.vision.models.layout import TokenLayout, class_positions
from ttt_adapt.vision.models.positions import LearnedPositions, resize_table, sincos2d
from ttt_adapt.vision.models.settings import ViTSettings
from ttt_adapt.vision.models.timm_registration import _entry_point

TINY: dict[str, Any] = {
    "dim": 16, "depth": 4, "num_heads": 2, "patch_size": 4, "image_size": (8, 16),
    "in_channels": 1, "num_classes": 3, "head_init": "normal",
}  # fmt: skip
POOLS = ("mean", "max", "head_token", "mid_token", "double_token")
KINDS = ("vision_ttt_tiny", "vit_tiny_attention", "vit_tiny_mttt_linear")


def tiny(name: str = "vision_ttt_tiny", seed: int = 0, **overrides: Any) -> VisionModel:
    torch.manual_seed(seed)
    return create_model(name, **{**TINY, **overrides}).eval()


def some_images(batch: int = 2, height: int = 8, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randn(batch, 1, height, width, generator=generator)


def first_block(model: VisionModel) -> Any:
    return model.blocks[0]


# Names.


def test_names() -> None:
    mixers = ("attention", "linear_attention", "mttt_linear", "mttt_mlp")
    vits = [
        f"vit_{size}_{mixer}{ending}"
        for size in ("tiny", "small")
        for mixer in mixers
        for ending in ("", "_pixel")
    ]
    plain = [f"vision_ttt_{size}" for size in ("tiny", "small", "base")]
    assert list_models() == sorted(vits + plain)
    assert list_models("vision_ttt") == sorted(plain)
    with pytest.raises(ModelError, match="expected a family of vit, vision_ttt, found 'cnn'"):
        list_models("cnn")


@pytest.mark.parametrize("name", list_models())
def test_every_model_learns_from_images(name: str) -> None:
    patch = 2 if name.endswith("_pixel") else 4
    model = tiny(name, patch_size=patch, depth=1).train()
    images = some_images()
    logits = model(images)
    assert logits.shape == (2, 3)
    loss: Any = functional.cross_entropy(logits, torch.tensor([0, 2]))
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A decoder's bias shifts all reconstructions alike; W0 = 0 gives a linear loss no use for it.
    assert [n for n in without if "decoder_bias" not in n] == []
    assert model.architecture == name


@pytest.mark.parametrize(
    ("name", "overrides", "error", "message"),
    [
        ("vision_ttt_tinny", {}, ModelError, "found 'vision_ttt_tinny'; did you mean vision_ttt_tiny?"),
        ("vittt_tiny", {}, ModelError, "expected the name of a vision model"),
        ("cnn", {}, ModelError, "found 'cnn'; known: vision_ttt_base, "),
        ("vit_tiny_mttt_mlp", {"stepz": 4}, SettingsError, "unknown argument stepz; did you mean steps?"),
        ("vit_tiny_attention", {"steps": 4}, SettingsError, "vit_tiny_attention: unknown argument steps"),
        ("vit_tiny_attention", {"mttt": {}}, SettingsError, "unknown argument mttt"),
        ("vit_tiny_attention", {"if_devide_out": True}, SettingsError, "unknown argument if_devide_out"),
        ("vit_tiny_mttt_mlp", {"strategy": "adam"}, SettingsError, "mttt: strategy: "),
        ("vit_tiny_mttt_mlp", {"preset": "blog"}, SettingsError, "expected a preset of paper, code"),
        ("vit_tiny_attention", {"dim": 18}, SettingsError, "multiple of 4 and at least 8"),
        ("vit_tiny_attention", {"image_size": (8, 0)}, SettingsError, "image_size"),
        ("vit_tiny_attention", {"num_classes": -1}, SettingsError, "num_classes"),
    ],
)  # fmt: skip
def test_mistakes(
    name: str, overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        create_model(name, **{**TINY, **overrides})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_mixers() -> None:
    model = tiny("vit_tiny_mttt_mlp", steps=4, strategy="sgd", preset="paper", bias=True)
    options = model.settings
    assert isinstance(options, ViTSettings)
    assert options.mttt is not None
    assert (options.mttt.steps, options.mttt.strategy) == (4, "sgd")
    assert (options.mttt.normalizer, options.mttt.bias, options.mttt.learner) == ("n", True, "mlp")
    linear = tiny("vit_tiny_linear_attention", feature_map="elu").settings
    assert isinstance(linear, ViTSettings)
    assert linear.linear_attention is not None
    assert linear.linear_attention.feature_map == "elu"
    with pytest.raises(ValueError, match="mttt: expected options of the mixer, which is attention"):
        ViTSettings(mttt=options.mttt)


def test_images_that_are_none() -> None:
    for shape in ((2, 3, 8, 16), (1, 8, 16), (2, 1, 0, 16)):
        with pytest.raises(ModelError, match=r"vision_ttt_tiny: expected images \[B, 1, H, W\]"):
            tiny()(torch.zeros(shape))


def test_the_control_does_not_mix() -> None:
    """Without a mixer a token is nothing but its own patch."""
    model, images = tiny("vit_tiny_attention", mixer="none"), some_images(1)
    other = images.clone()
    other[..., 12:] += 1.0
    same = (model.forward_features(other) == model.forward_features(images)).all(-1)[0]
    assert same.tolist() == [True, True, True, False] * 2


# Any height and width.


@settings(max_examples=20, deadline=None)
@given(height=st.integers(1, 40), width=st.integers(1, 40), kind=st.sampled_from(KINDS))
def test_any_height_and_width(height: int, width: int, kind: str) -> None:
    """The result is that of the image padded by hand with zeros at the right and bottom."""
    model, images = tiny(kind, depth=1), some_images(2, height, width)
    rows, columns = math.ceil(height / 4), math.ceil(width / 4)
    padded = torch.zeros(2, 1, rows * 4, columns * 4)
    padded[..., :height, :width] = images
    found = model.forward_features(images)
    assert found.shape == (2, rows * columns, 16)
    torch.testing.assert_close(found, model.forward_features(padded))
    assert model(images).isfinite().all()


def test_sine_and_cosine() -> None:
    """The table of the public JAX code, entry by entry."""
    found = sincos2d(3, 5, 16)
    for row in range(3):
        for column in range(5):
            for i in range(4):
                rate = 10_000.0 ** (-i / 3)
                expected = [f(at * rate) for at in (column, row) for f in (math.sin, math.cos)]
                assert found[row * 5 + column, i::4].tolist() == pytest.approx(expected, abs=1e-5)


def test_positions_of_another_size_cover_the_same_extent() -> None:
    native = sincos2d(4, 6, 16)
    assert torch.equal(sincos2d(4, 6, 16, native=(4, 6)), native)
    # Three times as many cells: every third has the centre of one of the old.
    finer = sincos2d(12, 18, 16, native=(4, 6)).view(12, 18, 16)
    torch.testing.assert_close(finer[1::3, 1::3].reshape(24, 16), native, atol=1e-5, rtol=1e-5)


def test_learned_positions_are_interpolated() -> None:
    table = torch.randn(6, 8)
    found = resize_table(table, (2, 3), (5, 7))
    grid = table.view(1, 2, 3, 8).permute(0, 3, 1, 2)
    expected = functional.interpolate(grid, (5, 7), mode="bicubic", antialias=True)
    torch.testing.assert_close(found.view(5, 7, 8), expected[0].permute(1, 2, 0))
    assert resize_table(table, (2, 3), (2, 3)) is table
    constant = resize_table(torch.ones(12, 8), (3, 4), (9, 2))
    torch.testing.assert_close(constant, torch.ones(18, 8))
    assert resize_table(table.bfloat16(), (2, 3), (4, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("position", ["learned", "sincos2d", "none"])
def test_setting_the_input_size_changes_nothing_but_where_work_is_done(position: str) -> None:
    model, images = tiny(position=position), some_images(2, 12, 20)
    before = model(images)
    model.set_input_size((12, 20))
    assert model.settings.image_size == (12, 20)
    assert model.pretrained_cfg["input_size"] == (1, 12, 20)
    torch.testing.assert_close(model(images), before)
    if position == "learned":
        assert isinstance(model.positions, LearnedPositions)
        assert model.positions.table.shape == (15, 16)
        model(images).sum().backward()
        assert model.positions.table.grad is not None
    model.set_input_size(16)
    assert model.settings.image_size == (16, 16)
    with pytest.raises(SettingsError, match="image_size"):
        model.set_input_size((0, 4))


# Class tokens and heads.


@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 5), width=st.integers(1, 5), pool=st.sampled_from(POOLS))
def test_a_layout_takes_apart_and_joins(height: int, width: int, pool: Any) -> None:
    places = class_positions(pool, height * width)
    layout = TokenLayout(height, width, places)
    tokens = torch.randn(2, layout.num_tokens, 4)
    image, class_tokens = layout.image_tokens(tokens), layout.class_tokens(tokens)
    assert image.shape[1] == height * width
    assert torch.equal(layout.join(image, class_tokens), tokens)
    expected = [t for t in range(layout.num_tokens) if t not in places]
    assert torch.equal(image, tokens[:, expected])
    assert torch.equal(layout.grid(tokens)[:, :, height - 1, 0], image[:, (height - 1) * width])
    turned = layout.reversed()
    assert torch.equal(turned.class_tokens(tokens.flip(1)), class_tokens.flip(1))
    assert turned.reversed() == layout


@pytest.mark.parametrize("kind", ["vision_ttt_tiny", "vit_tiny_attention"])
@pytest.mark.parametrize("pool", POOLS)
def test_classification_heads(kind: str, pool: str) -> None:
    model = tiny(kind, pool=pool)
    images = some_images(3)
    tokens = model.forward_features(images)
    num_class = {"head_token": 1, "mid_token": 1, "double_token": 2}.get(pool, 0)
    assert tokens.shape == (3, 8 + num_class, 16)
    expected = {
        "mean": tokens.mean(1),
        "max": torch.stack([row[row.norm(dim=-1).argmax()] for row in tokens]),
        "head_token": tokens[:, 0],
        "mid_token": tokens[:, 4],
        "double_token": (tokens[:, 0] + tokens[:, 9 - 10]) / 2,
    }[pool]
    pooled = model.forward_head(tokens, pre_logits=True)
    if model.pre_logits is not None:
        expected = model.pre_logits(expected)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(model(images), model.head(pooled))
    model.train()(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_class_tokens_pass_the_depthwise_convolution_by() -> None:
    model = tiny(pool="mid_token")
    tokens, layout = model.embed(some_images())
    convolved = first_block(model).dwconv(tokens, layout)
    assert torch.equal(layout.class_tokens(convolved), layout.class_tokens(tokens))
    alone = first_block(tiny(pool="mean")).dwconv
    alone.load_state_dict(first_block(model).dwconv.state_dict())
    expected = alone(layout.image_tokens(tokens), TokenLayout(2, 4))
    assert torch.equal(layout.image_tokens(convolved), expected)


def test_reset_classifier() -> None:
    model, images = tiny(), some_images()
    features = model.forward_features(images)
    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    assert model.num_classes == model.get_classifier().out_features == 7
    assert torch.equal(model.forward_features(images), features)
    model.reset_classifier(0, "max")
    assert torch.equal(model(images), model.forward_head(features, pre_logits=True))
    assert model.settings.pool == "max"
    with pytest.raises(ModelError, match="expected pool 'max', .* found 'head_token'"):
        model.reset_classifier(3, "head_token")
    with pytest.raises(SettingsError, match="num_classes"):
        model.reset_classifier(-1)
    half = tiny().bfloat16()
    half.reset_classifier(2)
    assert half(images.bfloat16()).dtype == torch.bfloat16


# The package.


def test_the_package_is_light_and_offers_what_it_says() -> None:
    code = "import ttt_adapt.vision, sys; dir(ttt_adapt.vision); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False"]
    assert ttt_adapt.vision.__all__ == sorted(ttt_adapt.vision.__all__)
    for name in ttt_adapt.vision.__all__:
        assert getattr(ttt_adapt.vision, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'vittt'"):
        _ = ttt_adapt.vision.vittt


def test_timm_is_asked_for_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "timm" not in sys.modules
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    with pytest.raises(MissingDependencyError, match="expected timm .* pip install timm"):
        ttt_adapt.vision.register_in_timm()


def test_arguments_that_timm_hands_over() -> None:
    make = _entry_point("vision_ttt_tiny")
    assert make.__name__ == "vision_ttt_tiny"
    model = make(
        False, img_size=32, in_chans=1, drop_path_rate=0.1, global_pool="token", depth=2,
        pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None,
    )  # fmt: skip
    found = model.settings
    assert (found.image_size, found.in_channels, found.drop_path) == ((32, 32), 1, 0.1)
    assert found.pool == "head_token"
    assert make(global_pool="avg", depth=1).settings.pool == "mean"
    with pytest.raises(ModelError, match="expected pretrained=False, for no weights are published"):
        make(pretrained=True)
    with pytest.raises(SettingsError, match="unknown setting img_sise"):
        make(img_sise=32)
