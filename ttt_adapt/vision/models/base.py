"""What all vision models have in common: images in, tokens through blocks, class scores out.

Shape legend: B images, C channels, H W pixels, h w grid, S sequence (image and class tokens),
D width, K classes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ttt_adapt.errors import ModelError
from ttt_adapt.settings import override
from ttt_adapt.vision.models import features
from ttt_adapt.vision.models.heads import ClassTokens, DropPath, make_classifier, pool_tokens
from ttt_adapt.vision.models.layout import NUM_CLASS_TOKENS, TokenLayout
from ttt_adapt.vision.models.patches import PatchEmbedding
from ttt_adapt.vision.models.positions import LearnedPositions, SincosPositions
from ttt_adapt.vision.models.settings import ImageSize, VisionModelSettings

LINEAR_STD = 0.02


class VisionModel(nn.Module, ABC):
    """A plain (non-hierarchical) vision model; see :func:`ttt_adapt.vision.create_model`.

    Args:
        settings: of the model's own family.
        architecture: the registered name it comes from, kept in ``config.json``.

    Attributes:
        patch_embed: patches to tokens.
        positions: added to image tokens; ``None``: none are.
        class_tokens: put among them, as ``settings.pool`` asks.
        blocks: each ``(tokens_BSD, layout) -> tokens_BSD``.
        norm: layer norm after the last block.
        pre_logits: a layer before the classifier, or ``None``.
        head: the classifier.
    """

    family: ClassVar[str]
    settings_kind: ClassVar[type[VisionModelSettings]]
    position_std: ClassVar[float | None] = 0.02
    """Of learned positions at the start; ``None``: ``1 / √D``."""
    image_mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)
    image_std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    def __init__(self, settings: VisionModelSettings, *, architecture: str = "") -> None:
        super().__init__()
        if type(settings) is not self.settings_kind:
            raise ModelError(
                f"{self.family}: expected settings of the kind {self.settings_kind.__name__}, "
                f"found {type(settings).__name__}"
            )
        self.settings, self.architecture = settings, architecture
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbedding(settings.in_channels, settings.dim, settings.patch_size)
        self.positions = self._make_positions()
        self.class_tokens = ClassTokens(settings.pool, settings.dim)
        step = settings.drop_path / max(1, settings.depth - 1)
        self.blocks = nn.ModuleList(
            self._make_block(DropPath(step * place)) for place in range(settings.depth)
        )
        self.norm = nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        self.pre_logits = self._make_pre_logits()
        self.head = make_classifier(settings.dim, settings.num_classes, settings.head_init)

    @abstractmethod
    def _make_block(self, drop_path: DropPath) -> nn.Module:
        """One block, ``(tokens_BSD, layout) -> tokens_BSD``."""

    def _make_pre_logits(self) -> nn.Module | None:
        return None

    def _make_positions(self) -> LearnedPositions | SincosPositions | None:
        settings = self.settings
        native = self.patch_embed.grid_size(*(settings.position_size or settings.image_size))
        if settings.position == "learned":
            std = self.position_std or 1 / math.sqrt(settings.dim)
            return LearnedPositions(native, settings.dim, std=std)
        if settings.position == "sincos2d":
            return SincosPositions(native, settings.dim)
        return None

    # From images to class scores.

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Class scores ``[B, K]`` of images ``[B, C, H, W]`` of any height and width.

        Raises:
            ModelError: not images of ``in_channels`` channels.
        """
        return self.forward_head(self.forward_features(images_BCHW))

    def forward_features(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Tokens ``[B, S, D]`` after the last layer norm; class tokens are where the head puts them."""
        tokens, layout = self.embed(images_BCHW)
        for after in self.run_blocks(tokens, layout):
            tokens = after
        normed: torch.Tensor = self.norm(tokens)
        return normed

    def forward_head(self, tokens_BSD: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Class scores ``[B, K]`` of :meth:`forward_features`' tokens; with ``pre_logits``, what the
        classifier reads ``[B, D]``."""
        pooled = pool_tokens(tokens_BSD, self.settings.pool)
        if self.pre_logits is not None:
            pooled = self.pre_logits(pooled)
        found: torch.Tensor = pooled if pre_logits else self.head(pooled)
        return found

    def embed(self, images_BCHW: torch.Tensor) -> tuple[torch.Tensor, TokenLayout]:
        """What the first block reads: ``[B, S, D]``, and where everything stands in it."""
        channels = self.settings.in_channels
        if images_BCHW.ndim != 4 or images_BCHW.shape[1] != channels or 0 in images_BCHW.shape:
            raise ModelError(
                f"{self.architecture or self.family}: expected images [B, {channels}, H, W], found "
                f"{list(images_BCHW.shape)}"
            )
        height, width = self.patch_embed.grid_size(*images_BCHW.shape[-2:])
        # The residual stream keeps the weights' dtype: autocast would begin it in half precision.
        dtype = self.patch_embed.proj.weight.dtype
        tokens = self.patch_embed(images_BCHW).to(dtype)
        if self.positions is not None:
            tokens = tokens + self.positions(height, width, tokens.device).to(dtype)
        sequence: tuple[torch.Tensor, TokenLayout] = self.class_tokens(tokens, height, width)
        return sequence

    def run_blocks(self, tokens_BSD: torch.Tensor, layout: TokenLayout) -> Iterator[torch.Tensor]:
        """Tokens after each block, one after the other."""
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens_BSD = checkpoint(block, tokens_BSD, layout, use_reentrant=False)
            else:
                tokens_BSD = block(tokens_BSD, layout)
            yield tokens_BSD

    # Feature maps.

    def forward_intermediates(
        self,
        images_BCHW: torch.Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Tokens after some of the blocks; see :func:`features.forward_intermediates`."""
        return features.forward_intermediates(
            self,
            images_BCHW,
            indices,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            stop_early=stop_early,
            output_fmt=output_fmt,
            intermediates_only=intermediates_only,
        )

    def forward_pyramid(
        self,
        images_BCHW: torch.Tensor,
        indices: Sequence[int] | None = None,
        strides: Sequence[int] = (4, 8, 16, 32),
    ) -> tuple[torch.Tensor, ...]:
        """Maps at several strides, for detection and segmentation heads; see
        :func:`features.forward_pyramid`."""
        return features.forward_pyramid(self, images_BCHW, indices, strides)

    # What users of timm expect.

    @property
    def num_classes(self) -> int:
        return self.settings.num_classes

    @property
    def num_features(self) -> int:
        """D, width of tokens and of what the classifier reads."""
        return self.settings.dim

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """What images to feed, under timm's names."""
        return {
            "architecture": self.architecture,
            "input_size": (self.settings.in_channels, *self.settings.image_size),
            "fixed_input_size": False,
            "num_classes": self.settings.num_classes,
            "mean": self.image_mean,
            "std": self.image_std,
            "interpolation": "bicubic",
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }

    default_cfg = pretrained_cfg

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, of 0 classes for none; the pooling may change where no class token
        enters.

        Raises:
            SettingsError: an unknown pooling or a negative number of classes.
            ModelError: a pooling that has other class tokens than the model.
        """
        changes: dict[str, Any] = {"num_classes": num_classes}
        if global_pool is not None:
            changes["pool"] = global_pool
        settings = override(self.settings, changes)
        before, after = self.settings.pool, settings.pool
        if before != after and (NUM_CLASS_TOKENS[before] or NUM_CLASS_TOKENS[after]):
            raise ModelError(
                f"expected pool {before!r}, whose class tokens the model was made with, found "
                f"{after!r}; create another model"
            )
        self.class_tokens.pool = settings.pool
        like = next(self.norm.parameters())
        self.head = make_classifier(settings.dim, num_classes, settings.head_init).to(
            device=like.device, dtype=like.dtype
        )
        self.settings = settings

    def set_input_size(self, img_size: ImageSize | int) -> None:
        """Tie the model to images of another size: learned positions are interpolated for good.

        Without it, any other size works as well, interpolating at each call.

        Raises:
            SettingsError: no height and width.
        """
        settings = override(self.settings, {"image_size": img_size})
        if isinstance(self.positions, LearnedPositions):
            settings = override(settings, {"position_size": None})
            self.positions.set_native(self.patch_embed.grid_size(*settings.image_size))
        elif isinstance(self.positions, SincosPositions):
            before = self.settings.position_size or self.settings.image_size
            settings = override(settings, {"position_size": before})
        self.settings = settings

    def no_weight_decay(self) -> set[str]:
        """Names of matrices that are no linear map's: positions, class tokens, and what the blocks
        name in ``no_weight_decay``. Vectors (biases, norms) are the optimizer's business."""
        names = {"positions.table", "class_tokens.weight"}
        for place, module in self.named_modules():
            names |= {f"{place}.{name}" for name in getattr(module, "without_weight_decay", ())}
        return names & {name for name, _ in self.named_parameters()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in backward instead of kept, for less memory."""
        self.grad_checkpointing = enable

    # Files.

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write ``config.json`` and ``model.safetensors``; see :func:`saving.save_model`."""
        from ttt_adapt.vision.models.saving import save_model

        return save_model(self, Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """The model that :meth:`save_pretrained` wrote, in evaluation mode.

        Raises:
            ModelError: no such model, files that are damaged or missing, or of another class.
        """
        from ttt_adapt.vision.models.saving import load_model

        model = load_model(Path(folder))
        if not isinstance(model, cls):
            raise ModelError(
                f"{folder}: expected a {cls.__name__}, found a {type(model).__name__}; load it with "
                "VisionModel.from_pretrained"
            )
        return model


def init_linear(module: nn.Module) -> None:
    """Normal weights of std 0.02, cut off at two, and zero biases, for ``module.apply``."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=LINEAR_STD, a=-2 * LINEAR_STD, b=2 * LINEAR_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
