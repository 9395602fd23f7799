"""Options of an MTTT layer, and what the paper and the public JAX code set them to.

The two differ: the code divides the inner loss by n · d instead of n (its steps are d times smaller),
and gives the projections biases.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ttt_adapt.errors import SettingsError
from ttt_adapt.settings import Settings, make_settings
from ttt_adapt.vision.inner_loop.function import Normalizer, Strategy
from ttt_adapt.vision.inner_loop.learners import LearnerName

PresetName = Literal["paper", "code"]
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"normalizer": "n", "bias": False},
    "code": {"normalizer": "n*d", "bias": True},
}

_LEARNERS: dict[str, dict[str, Any]] = {
    "linear": {"initial": "zero", "learner_bias": False, "decoder_norm": False},
    "mlp": {"initial": "learned", "learner_bias": True, "decoder_norm": True},
}


class MTTTSettings(Settings):
    """Everything a layer's inner loop can be set to; ``mttt`` documents what the options do."""

    learner: LearnerName = "linear"
    strategy: Strategy = "full"
    steps: int = Field(1, ge=0, description="T of full-batch descent and SGD")
    mini_batch_size: int = Field(16, ge=1, description="b of causal mini-batches")
    eta: float | Annotated[tuple[float, ...], Field(min_length=1)] = Field(
        1.0, description="inner learning rate, or one for each step"
    )
    normalizer: Normalizer = "n"
    initial: Literal["zero", "fixed", "learned"] = Field(
        "zero", description="W0: zero, random and fixed, or learned by the outer loop"
    )
    learner_bias: bool = Field(False, description="biases in the learner's layers")
    targets: Literal["tokens", "values"] = Field(
        "tokens", description="reconstruct the whole token by a decoder, or a head's value"
    )
    decoder_norm: bool = Field(False, description="layer norm after the decoder (Decoder LN)")
    feature_norm: bool = Field(False, description="layer norm after the learner")
    residual: bool = Field(False, description="f(x) = x + ...")
    gate: bool = Field(False, description="multiply the heads' features by gelu(x W)")
    rope_theta: float | None = Field(
        None, gt=0, description="base of rotary positions of keys and queries; none: no positions"
    )
    bias: bool = Field(False, description="biases of the projections into, and out of, the heads")
    closed_form: bool = Field(True, description="a linear learner's steps in closed form")
    seed: int = Field(0, ge=0, description="order of SGD's mini-batches in evaluation")

    @model_validator(mode="after")
    def _fits(self) -> "MTTTSettings":
        if self.initial == "zero" and self.learner == "mlp":
            raise ValueError("initial: expected fixed or learned for an MLP, found zero")
        if self.decoder_norm and self.targets == "values":
            raise ValueError("decoder_norm: expected targets = tokens, values have no decoder")
        if not isinstance(self.eta, float) and len(self.eta) != self.num_etas:
            raise ValueError(f"eta: expected one, or {self.num_etas}, found {len(self.eta)}")
        return self

    @property
    def num_etas(self) -> int:
        return self.steps if self.strategy in ("full", "sgd") else 1


def preset(name: str = "code", **options: Any) -> MTTTSettings:
    """A preset's settings for the learner among ``options``, which otherwise override them.

    Raises:
        SettingsError: an unknown preset or option, or a value out of range.
    """
    if name not in PRESETS:
        raise SettingsError(f"expected a preset of {', '.join(PRESETS)}, found {name!r}")
    learner = options.get("learner", "linear")
    values = {**_LEARNERS.get(str(learner), {}), **PRESETS[name]}
    if options.get("targets") == "values":
        values["decoder_norm"] = False
    return make_settings(MTTTSettings, {**values, **options}, where="mttt")
