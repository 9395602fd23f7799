"""The shape of a language model of TTT layers, attention, or both."""

import hashlib
import json
from typing import Any, ClassVar, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ttt_adapt.errors import ModelError
from ttt_adapt.layers import FeatureMap

LayerType = Literal["ttt_linear", "ttt_mlp", "attention", "linear_attention"]
"""What mixes tokens in a block; ``attention`` makes it one of the Transformer++ baseline."""

MODEL_TYPE = "ttt_adapt"

# What decides whether a cache fits: everything that its tensors and their meaning depend on.
_CACHE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "layer_types",
    "mini_batch_size",
    "base_lr",
    "rope_theta",
    "use_gate",
    "share_qk",
    "pre_conv",
    "conv_kernel",
)
# Likewise, but caches may be older than these: they count where they are not at their defaults.
_LATER_CACHE_KEYS = ("inner_norm", "learnable_w0", "learnable_lr", "feature_map")


@strict
class TTTConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of :class:`ttt_adapt.models.TTTForCausalLM`.

        TTTConfig(hidden_size=256, num_attention_heads=4, layer_types="ttt_linear")
        TTTConfig(num_hidden_layers=3, layer_types=["ttt_linear", "attention", "ttt_linear"])

    The defaults are the 125M model of Sun et al. 2024 (arXiv 2407.04620, appendix C) with the
    Transformer backbone; the Mamba backbone has ``use_gate``, ``share_qk`` and ``pre_conv``.

    Args:
        layer_types: one of :data:`LayerType` for all blocks, or one for each.
        hidden_size: C, a multiple of ``2 · num_attention_heads``.
        intermediate_size: of the SwiGLU feed-forward parts.
        mini_batch_size: b, tokens per step of inner gradient descent.
        base_lr: η_base; ``None``: 1.0 in TTT-Linear and 0.1 in TTT-MLP blocks.
        rope_theta: base of rotary positions, within mini-batches and in attention.
        use_gate: a GELU gate on the output of TTT layers.
        share_qk: one projection for q and k with short convolutions.
        pre_conv: a short convolution before each block's mixer.
        conv_kernel: taps of those convolutions.
        inner_norm: ``False``: the inner model of TTT-Linear is ``f(x) = x W``, without layer norm and
            residual; see :class:`ttt_adapt.layers.TTTPlainLinear`.
        learnable_w0: ``False``: without ``inner_norm``, sequences begin with W = 0.
        learnable_lr: ``False``: inner learning rates keep the values that learned ones begin with.
        feature_map: of linear attention: ``identity``, or ``elu`` with a normaliser.
        max_position_embeddings: tokens the model was trained on at a time. TTT layers have no
            limit of their own; windows of scoring and chunks of learning are cut to this.
        backend: of the operators; see :mod:`ttt_adapt.kernels`.

    Raises:
        ModelError: sizes or layer types that do not fit.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[Any] = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    layer_types: list[str] | str = "ttt_linear"
    mini_batch_size: int = 16
    base_lr: float | None = None
    rope_theta: float = 10_000.0
    use_gate: bool = False
    share_qk: bool = False
    pre_conv: bool = False
    conv_kernel: int = 4
    inner_norm: bool = True
    learnable_w0: bool = True
    learnable_lr: bool = True
    feature_map: str = "identity"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.layer_types, str):
            self.layer_types = [self.layer_types] * self.num_hidden_layers
        if self.base_lr is not None:
            self.base_lr = float(self.base_lr)
        layer_types = self.layer_types
        _require_sound(self)
        parent: Any = super()
        parent.__post_init__(**kwargs)
        self.layer_types = layer_types  # the library knows attention by another name

    def validate_layer_type(self) -> None:
        """The library's own check knows no TTT layers; :class:`ModelError` has said what is wrong."""

    def cache_key(self) -> str:
        """SHA-256 over what a cache's tensors depend on, but for the weights."""
        values = {key: getattr(self, key) for key in _CACHE_KEYS}
        for key in _LATER_CACHE_KEYS:
            if getattr(self, key) != getattr(type(self), key):
                values[key] = getattr(self, key)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _require_sound(config: TTTConfig) -> None:
    known = get_args(LayerType)
    unknown = sorted(set(config.layer_types) - set(known))
    if unknown:
        raise ModelError(
            f"expected layer_types of {', '.join(known)}, found {', '.join(map(repr, unknown))}"
        )
    if len(config.layer_types) != config.num_hidden_layers:
        raise ModelError(
            f"expected a layer type for each of {config.num_hidden_layers} layers, found "
            f"{len(config.layer_types)}; give one name for all, or num_hidden_layers"
        )
    if not config.inner_norm and "ttt_mlp" in config.layer_types:
        raise ModelError(
            "expected inner_norm with ttt_mlp layers, found inner_norm=False; it is ttt_linear that "
            "has a plain form"
        )
    if config.inner_norm and not config.learnable_w0:
        raise ModelError(
            "expected learnable_w0 with inner_norm, found learnable_w0=False; the gradient through a "
            "layer norm of zeros has no bound, so add inner_norm=False"
        )
    if config.feature_map not in get_args(FeatureMap):
        raise ModelError(
            f"expected feature_map of {', '.join(get_args(FeatureMap))}, found "
            f"{config.feature_map!r}"
        )
    if config.hidden_size % (2 * config.num_attention_heads):
        raise ModelError(
            "expected hidden_size to be a multiple of 2 · num_attention_heads "
            f"({2 * config.num_attention_heads}), found {config.hidden_size}"
        )
