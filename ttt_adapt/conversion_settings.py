"""Settings of ``ttt-adapt convert``: what replaces attention, how it learns, what is measured.

Every field's default is the one the command line uses.
"""

from typing import Literal, Self

from pydantic import model_validator

from ttt_adapt.config import (
    CorpusSettings,
    Fraction,
    ModelSettings,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
)
from ttt_adapt.settings import Settings

__all__ = ["ConversionSettings", "ConvertSettings", "DistillationSettings"]


class ConversionSettings(Settings):
    """What takes the place of softmax attention, and where. Owner: ``ttt_adapt.models.conversion``.

    Resolved, it lies in the ``config.json`` of a converted model, which is rebuilt from it.
    """

    layers: str = "all"
    """``all``, ``none``, indices and ranges (``0,3,5-7``), ``every-N`` (each N-th, the last of every
    N), ``first-N`` or ``last-N``."""
    to: Literal["ttt-linear", "ttt-mlp"] = "ttt-linear"
    mode: Literal["pure", "gated", "distilled"] = "pure"
    """``pure``: no new parameters. ``gated``: attention stays, ``tanh(alpha)`` times the TTT layer's
    output is added. ``distilled``: the TTT layer has parameters of its own, which are trained."""
    inner_norm: bool = False
    """The inner loss and output of the TTT paper, ``q + LN(f(q))``, instead of plain ``f(q)``."""
    qk_norm: Literal["l2", "none"] = "l2"
    """``l2``: queries and keys have length one, so that a rate below two never diverges."""
    rotary: Literal["original", "mini-batch", "none"] = "original"
    """Rotary positions of q and k: those of the model, positions within the mini-batch, or none.
    Models without rotary positions are not affected."""
    mini_batch_size: PositiveInt | None = None
    """Tokens that learn from the same weights. ``None``: 1 in ``pure`` mode, else 16."""
    learning_rate: Positive | None = None
    """Of the inner steps on ½‖f(k) − v‖², where training begins. ``None``: by the kind of layer."""
    hidden_factor: PositiveInt = 4
    """Hidden width of TTT-MLP, in head widths."""
    feature_maps: bool = True
    """A learned matrix for each head on q and on k; not in ``pure`` mode."""
    alpha: float = 0.0
    """Of the gate, where training begins."""
    seed: Seed = 0
    """Of TTT-MLP's weights where a sequence begins (and TTT-Linear's, with ``inner_norm``)."""


class DistillationSettings(Settings):
    """Recovery of a converted model. Owner: ``ttt_adapt.training.distillation``."""

    max_length: PositiveInt = 512
    """Tokens of a training sequence."""
    batch_size: PositiveInt = 4
    """Sequences per step."""
    transfer_steps: NonNegativeInt = 200
    """Attention transfer: each new layer learns the output of the attention it replaces."""
    transfer_learning_rate: Positive = 1e-2
    lora_steps: NonNegativeInt = 200
    """LoRA on the converted model, its new parameters learning too."""
    lora_learning_rate: Positive = 1e-3
    lora_rank: PositiveInt = 8
    lora_alpha: Positive = 16.0
    lora_targets: tuple[str, ...] = ()
    """Names of linear layers; empty: the projections of every layer's attention."""
    kl_weight: Fraction = 0.5
    """Share of the divergence from the original's predictions in LoRA's loss; the rest is
    cross-entropy."""
    warmup_fraction: Fraction = 0.05
    decay_fraction: Fraction = 0.5
    max_grad_norm: Positive = 1.0
    checkpoint_every: PositiveInt = 50


class ConvertSettings(Settings):
    """Everything ``ttt-adapt convert`` needs: what its TOML recipe holds."""

    model: ModelSettings = ModelSettings()
    conversion: ConversionSettings = ConversionSettings()
    distillation: DistillationSettings = DistillationSettings()
    text: CorpusSettings | None = None
    """What perplexity is measured on."""
    train: CorpusSettings | None = None
    """What distillation learns from: other text than ``text``."""
    max_bytes: PositiveInt = 60_000
    """Text to measure on, cut at a character."""
    max_train_tokens: PositiveInt = 1_000_000
    max_length: PositiveInt | None = None
    """Tokens of a window to measure in; ``None``: the model's own limit."""
    per_layer: bool = True
    """Measure each layer converted alone, too."""
    seed: Seed = 0
    """Of the training's order of sequences and LoRA's beginning."""

    @model_validator(mode="after")
    def _texts_differ(self) -> Self:
        if self.text is not None and self.text == self.train:
            raise ValueError("text and train are the same; measure on text that was not learned")
        return self
