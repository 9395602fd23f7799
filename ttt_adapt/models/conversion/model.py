"""A language model of transformers with some layers' attention replaced, as a model of its own.

Its ``config.json`` holds the original's (``text_config``) and the conversion; loading it rebuilds the
original's architecture, replaces what was replaced, and reads the weights.
"""

import copy
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig, SubConfigSpec
from transformers.initialization import no_init_weights

from ttt_adapt.conversion_settings import ConversionSettings
from ttt_adapt.errors import ModelError
from ttt_adapt.models.conversion.attention import (
    TTTAttention,
    converted_layers,
    require_static_rotary,
)
from ttt_adapt.models.conversion.families import HeadShape, decoder_layers, family_of
from ttt_adapt.models.conversion.inner import resolved
from ttt_adapt.models.conversion.layers import choose_layers
from ttt_adapt.settings import make_settings


class ConvertedConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of a converted model.

    Args:
        text_config: the original model's configuration.
        conversion: resolved :class:`ttt_adapt.conversion_settings.ConversionSettings`, as values.
    """

    model_type = "ttt_adapt_converted"
    keys_to_ignore_at_inference: ClassVar[Any] = ["past_key_values"]
    sub_configs_defaults: ClassVar[Any] = {
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama")
    }

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    conversion: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        parent: Any = super()
        parent.__post_init__(**kwargs)
        inner: Any = self.text_config
        self.tie_word_embeddings = bool(getattr(inner, "tie_word_embeddings", False))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(inner, name, None))

    def settings(self) -> ConversionSettings:
        """The conversion.

        Raises:
            SettingsError: it was written by another version, or by hand.
        """
        return make_settings(ConversionSettings, self.conversion or {}, where="config.conversion")


class ConvertedForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A causal language model with TTT layers in the place of some (or all) of its attention.

    Attributes:
        base: the original's class; converted layers hold a :class:`TTTAttention`.
    """

    config_class = ConvertedConfig
    base_model_prefix = "base"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _is_stateful = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012  as the base class has it

    def __init__(self, config: ConvertedConfig, base: Any = None) -> None:
        super().__init__(config)
        given = base is not None
        make: Any = AutoModelForCausalLM.from_config  # it has no types
        self.base = base if given else make(config.text_config)
        # One configuration, so that what is set on one is seen by the other.
        config.text_config = self.base.config
        install(self.base, config.settings())
        finish: Any = self.post_init
        if given:
            with no_init_weights():
                finish()
            self.generation_config = copy.deepcopy(base.generation_config)
        else:
            finish()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """The original's; states of converted layers live in ``past_key_values``, a dynamic cache."""
        return self.base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def get_input_embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, value: Any) -> None:
        self.base.set_output_embeddings(value)


def convert_model(model: Any, settings: ConversionSettings) -> ConvertedForCausalLM:
    """Replace the attention of the chosen layers; the model given becomes part of the result.

    Weights of the original are used as they are, not copied.

    Args:
        model: a causal language model of transformers, of a known family.
        settings: what to replace, and by what.

    Raises:
        ModelError: an architecture that is not known, or one that is converted already.
        SettingsError: layers that the model does not have.
    """
    if converted_layers(model) or isinstance(model, ConvertedForCausalLM):
        raise ModelError("expected a model of plain attention, found one that is converted already")
    family_of(model.config)
    layers = choose_layers(settings.layers, len(decoder_layers(model)))
    plan = resolved(settings, layers)
    make: Any = ConvertedConfig  # its parent takes more than it names
    config = make(
        text_config=model.config,
        conversion=plan.model_dump(),
        dtype=model.dtype,
        # The configuration hands it down, and would hand down nothing.
        attn_implementation=model.config._attn_implementation,
        name_or_path=getattr(model.config, "name_or_path", ""),
    )
    mode, device, dtype = model.training, model.device, model.dtype
    converted = ConvertedForCausalLM(config, base=model)
    for module in converted_layers(converted):
        module.to(device=device, dtype=dtype)
    converted.train(mode)
    return converted


def install(model: Any, settings: ConversionSettings) -> None:
    """Put a :class:`TTTAttention` around the attention of the layers that ``settings`` names.

    Raises:
        ModelError: an architecture that is not known or whose positions do not fit.
    """
    family, shape = family_of(model.config), HeadShape.of(model.config)
    rotary = getattr(model.base_model, "rotary_emb", None) if family.rotary else None
    if rotary is not None and settings.rotary == "mini-batch":
        require_static_rotary(model.config)
    layers = decoder_layers(model)
    for index in choose_layers(settings.layers, len(layers)):
        attention = getattr(layers[index], family.attention)
        new = TTTAttention(attention, settings, shape, index, rotary)
        setattr(layers[index], family.attention, new)
