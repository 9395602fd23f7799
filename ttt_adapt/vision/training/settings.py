"""Settings of one training run of a vision model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ttt_adapt.settings import Settings
from ttt_adapt.vision.data.settings import AugmentationSettings, ImageDataSettings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
PositiveInt = Annotated[int, Field(ge=1)]
Option = bool | int | float | str | tuple[int, ...]


class VisionTrainSettings(Settings):
    """Model, data, optimizer and schedule. Owner: ``ttt_adapt.vision.training``."""

    name: str
    model: str = "vision_ttt_tiny"
    """As :func:`ttt_adapt.vision.create_model` knows it."""
    overrides: dict[str, Option] = Field(default_factory=dict)
    """Other arguments of it. Image size, channels and classes follow from the data."""
    initial_model: str | None = None
    """A folder of a trained model to start from (its backbone; a head of other classes is new)."""
    data: ImageDataSettings
    augmentation: AugmentationSettings = AugmentationSettings()
    batch_size: PositiveInt = 1024
    """Images a step, over all processes."""
    micro_batch_size: PositiveInt | None = None
    """Images at once in a process; ``None``: its whole share."""
    epochs: PositiveInt | None = None
    num_steps: PositiveInt | None = None
    """Exactly one of the two says how long."""
    learning_rate: Positive = 1e-3
    final_learning_rate: NonNegative = 0.0
    """Where the cosine falls to."""
    warmup_epochs: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.05
    """As in torch's AdamW: each step takes ``learning_rate · weight_decay`` of a weight. Weights of
    one dimension, and what the model names in ``no_weight_decay``, keep theirs."""
    max_grad_norm: Positive | None = None
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Of a running average of the weights, saved beside the model; ``None``: without."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Autocast of the forward pass; weights and moments stay float32."""
    gradient_checkpointing: bool = False
    validate_every: PositiveInt | None = None
    """Steps between validations; ``None``: once a pass over the data. The last step is validated
    too."""
    log_every: PositiveInt = 50
    checkpoint_every: PositiveInt = 1000
    record_inner_losses: Annotated[int, Field(ge=0)] = 0
    """Validation images over which the inner loops' losses are averaged at each validation;
    0: they are not recorded."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read images."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.epochs is None) == (self.num_steps is None):
            raise ValueError("expected epochs or num_steps, and not both")
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError("expected warmup_epochs or warmup_steps, found both")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError("final_learning_rate: expected at most learning_rate")
        taken = {"image_size", "in_channels", "num_classes"} & set(self.overrides)
        if taken:
            raise ValueError(f"overrides: {min(taken)} follows from the data; set it there")
        return self
