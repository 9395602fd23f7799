"""Settings of vision models: what ``create_model`` takes, what ``config.json`` holds.

They are frozen, refuse what they do not know, and suggest what was probably meant.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ttt_adapt.settings import Settings
from ttt_adapt.vision.inner_loop.presets import MTTTSettings

Pool = Literal["mean", "max", "head_token", "mid_token", "double_token"]
"""Where the classified vector comes from: table 4 of Vision-TTT, in the order 5, 4, 1, 2, 3."""

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]


def _pair(value: Any) -> Any:
    """A square's side stands for both."""
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value


ImageSize = Annotated[tuple[Positive, Positive], BeforeValidator(_pair)]
"""Height and width in pixels; one number is a square."""


class VisionModelSettings(Settings):
    """What all vision models have in common.

    Attributes:
        image_size: height and width that positions are made for; any other is interpolated.
        patch_size: side of a patch in pixels; 1: pixels are tokens.
        in_channels: of the images.
        num_classes: outputs of the classifier; 0: none, the pooled vector comes out.
        dim: D, width of tokens.
        depth: number of blocks.
        num_heads: N; D is a multiple of it.
        pool: which of the five classification heads.
        position: learned table, fixed sine and cosine in two dimensions, or none.
        position_size: height and width whose grid the positions are tied to; ``None``:
            ``image_size``. ``set_input_size`` keeps it for sine and cosine.
        drop_path: stochastic depth of the last block, growing linearly from 0 at the first.
        norm_eps: of the layer norms.
        head_init: classifier weights at the start: zero, or normal with std 0.02.
    """

    image_size: ImageSize = (224, 224)
    patch_size: Positive = 16
    in_channels: Positive = 3
    num_classes: Annotated[int, Field(ge=0)] = 1000
    dim: Positive = 192
    depth: Positive = 12
    num_heads: Positive = 3
    pool: Pool = "mean"
    position: Literal["learned", "sincos2d", "none"] = "learned"
    position_size: ImageSize | None = None
    drop_path: Rate = 0.0
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-6
    head_init: Literal["zeros", "normal"] = "normal"

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(
                f"expected dim to be a multiple of num_heads ({self.num_heads}), found {self.dim}"
            )
        if self.position == "sincos2d" and (self.dim % 4 or self.dim < 8):
            raise ValueError(
                "expected dim to be a multiple of 4 and at least 8 for position sincos2d, found "
                f"{self.dim}"
            )
        return self


class VisionTTTSettings(VisionModelSettings):
    """Vision-TTT (Kong et al. 2026, arXiv 2603.00518); defaults are the whole Vittt block.

    Attributes:
        mini_batch_size: b, tokens in a step of inner gradient descent.
        dual: a second inner loop over the tokens from last to first ("dual dataset strategy").
        share_qk: one projection for queries and keys.
        gate: multiply the inner loops' outputs by an activation of a projection.
        gate_activation: GELU (algorithm 1) or the logistic function (σ of equations 11 and 12).
        conv1d: causal depth-wise convolutions of queries and keys, each its own.
        conv1d_taps: of those.
        dwconv: 3×3 depth-wise convolution over the grid before each block ("Conv2d-based dataset
            preprocessing"); class tokens pass it by.
        initial_weights: W₀ learned for each direction (the paper's W₀²), one for both (W₀¹), or
            drawn once and never learned (W₀⁰).
        merge: directions added (equation 12), or halved as well, against overflow in half precision.
        residual: the block's output is added to what its layer norm read (equation 9) or to what
            that made of it (algorithm 1).
        base_lr: η_base; a key's learning rate is ``base_lr · σ(gate) / d``.
        token_scale: ``max(1 / i + offset, 0)`` by position i in the mini-batch, the offset learned;
            ``1 / i`` alone; or 1 throughout (algorithm 1).
        post_norm: a layer norm for each direction's output before the gate.
        rope: rotary positions within a mini-batch, for queries and keys.
        rope_theta: their base.
        mlp_hidden: hidden width of SwiGLU; ``None``: 8 D / 3.
        backend: of the operator: ``auto``, ``reference``, ``chunked`` or ``triton``.
    """

    mini_batch_size: Positive = 16
    dual: bool = True
    share_qk: bool = True
    gate: bool = True
    gate_activation: Literal["gelu", "sigmoid"] = "gelu"
    conv1d: bool = True
    conv1d_taps: Positive = 4
    dwconv: bool = True
    initial_weights: Literal["separate", "shared", "frozen"] = "separate"
    merge: Literal["sum", "mean"] = "sum"
    residual: Literal["input", "normed"] = "input"
    base_lr: Annotated[float, Field(gt=0.0)] = 1.0
    token_scale: Literal["learned", "reciprocal", "one"] = "learned"
    post_norm: bool = True
    rope: bool = False
    rope_theta: Annotated[float, Field(gt=0.0)] = 10_000.0
    mlp_hidden: Positive | None = None
    backend: Literal["auto", "reference", "chunked", "triton"] = "auto"

    @model_validator(mode="after")
    def _rotary_fits(self) -> Self:
        if self.rope and self.dim % (2 * self.num_heads):
            raise ValueError(
                f"expected dim to be a multiple of 2 · num_heads ({2 * self.num_heads}) for rope, "
                f"found {self.dim}"
            )
        return self


class AttentionSettings(Settings):
    """Of softmax attention.

    Attributes:
        bias: of the four projections.
        scale: of scores; ``None``: ``1 / √d``.
    """

    bias: bool = True
    scale: Annotated[float, Field(gt=0.0)] | None = None


class LinearAttentionSettings(Settings):
    """Of linear attention.

    Attributes:
        feature_map: ``identity`` as MTTT's tables have it, or ``elu`` (Katharopoulos et al.).
        normalizer: see :class:`ttt_adapt.vision.mixers.LinearAttention`.
        bias: of the four projections.
    """

    feature_map: Literal["identity", "elu"] = "identity"
    normalizer: Literal["n", "n*d", "adaptive"] | None = None
    bias: bool = True


class ViTSettings(VisionModelSettings):
    """A Vision Transformer whose attention can be replaced; defaults are MTTT's ViT (section 5.1).

    Attributes:
        mixer: what mixes tokens; the table of its name below has its options. ``none`` leaves
            mixing out: the control of a task that needs it.
        attention: of ``attention``.
        linear_attention: of ``linear_attention``.
        mttt: of ``mttt``: inner learner, steps, ….
        mlp_ratio: hidden width of the perceptrons, in units of D.
        pre_logits: a layer of D and tanh before the classifier.
    """

    position: Literal["learned", "sincos2d", "none"] = "sincos2d"
    head_init: Literal["zeros", "normal"] = "zeros"
    mixer: Literal["attention", "linear_attention", "mttt", "none"] = "attention"
    attention: AttentionSettings | None = None
    linear_attention: LinearAttentionSettings | None = None
    mttt: MTTTSettings | None = None
    mlp_ratio: Annotated[float, Field(gt=0.0)] = 4.0
    pre_logits: bool = True

    @model_validator(mode="after")
    def _one_mixer(self) -> Self:
        for table in MIXER_TABLES:
            if table != self.mixer and getattr(self, table) is not None:
                raise ValueError(f"{table}: expected options of the mixer, which is {self.mixer}")
        return self


MIXER_TABLES: dict[str, type[Settings]] = {
    "attention": AttentionSettings,
    "linear_attention": LinearAttentionSettings,
    "mttt": MTTTSettings,
}
