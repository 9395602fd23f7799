"""Vision models on disk: the same scores after, and errors for what is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.vision import VisionModel, VisionTransformer, VisionTTT, create_model

TINY: dict[str, Any] = {
    "dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "image_size": (8, 16),
    "in_channels": 1, "num_classes": 3, "head_init": "normal",
}  # fmt: skip


def tiny(name: str = "vision_ttt_tiny", **overrides: Any) -> VisionModel:
    torch.manual_seed(0)
    return create_model(name, **{**TINY, **overrides}).eval()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vision_ttt_tiny", {"pool": "double_token", "initial_weights": "frozen"}),
        ("vision_ttt_tiny", {"initial_weights": "shared", "position": "none"}),
        ("vit_tiny_attention", {"mixer": "none"}),
        ("vit_tiny_linear_attention", {"feature_map": "elu"}),
        ("vit_tiny_mttt_mlp", {"steps": 2, "eta": (1.0, 0.5), "strategy": "sgd"}),
        ("vit_tiny_mttt_linear_pixel", {"patch_size": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(
    tmp_path: Path, name: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    model = tiny(name, **overrides).to(dtype)
    model.set_input_size((12, 8))
    assert model.save_pretrained(tmp_path / "model") == tmp_path / "model"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    loaded = VisionModel.from_pretrained(str(tmp_path / "model"))
    assert type(loaded) is type(model)
    assert (loaded.settings, loaded.architecture) == (model.settings, name)
    assert not loaded.training
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    images = torch.randn(2, 1, 9, 13).to(dtype)
    assert torch.equal(loaded(images), model(images))
    loaded.train()(images).sum().backward()
    assert all(p.requires_grad and p.grad is not None for p in loaded.head.parameters())


def test_a_class_loads_its_own(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    assert isinstance(VisionTTT.from_pretrained(tmp_path), VisionTTT)
    with pytest.raises(ModelError, match="expected a VisionTransformer, found a VisionTTT"):
        VisionTransformer.from_pretrained(tmp_path)


def test_saving_again_replaces_both_files(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    other = tiny(depth=1)
    other.save_pretrained(tmp_path)
    assert len(VisionModel.from_pretrained(tmp_path).blocks) == 1


def break_weights(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (break_weights, ModelError, "SHA-256 differs from the manifest's; save the model again"),
        (lambda f: (f / "model.safetensors").unlink(), ModelError, "model.safetensors: missing"),
        (lambda f: (f / "config.json").unlink(), ModelError, "expected a vision model's directory"),
        (lambda f: (f / "config.json").write_text("{"), ModelError, "config.json: cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), ModelError, "expected the configuration"),
        (lambda f: edit(f, format="other"), ModelError, "of a vision model of this package"),
        (lambda f: edit(f, format_version=2), ModelError, "expected format version 1, found 2"),
        (lambda f: edit(f, family="cnn"), ModelError, "expected a family of vit, vision_ttt"),
        (lambda f: edit(f, files={}), ModelError, "does not name model.safetensors"),
        (lambda f: edit(f, settings={"dims": 4}), SettingsError, "unknown setting dims; did you mean dim?"),
        (lambda f: edit(f, settings={"depth": 1}), ModelError, "weights do not fit"),
    ],
)  # fmt: skip
def test_damaged_models(tmp_path: Path, damage: Any, error: type[Exception], message: str) -> None:
    tiny().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(error) as caught:
        VisionModel.from_pretrained(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_left_of_a_call_that_fails(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        tiny().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
