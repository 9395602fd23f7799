"""Language models whose blocks mix tokens by TTT layers or by attention, for transformers.

A block is ``x + mixer(norm(x))`` and ``x + swiglu(norm(x))``, with ``x + conv(norm(x))`` before it
in the Mamba backbone (Sun et al. 2024, arXiv 2407.04620, section 2.7 and figure 10). With
``attention`` everywhere it is the Transformer++ baseline.

Shape legend: B rows, T tokens, C width, V vocabulary.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from ttt_adapt.errors import ModelError
from ttt_adapt.kernels.inner_loop.rows import rows_of_mask
from ttt_adapt.layers import ShortConvolution, TTTLayer, convolution_tail
from ttt_adapt.models.ttt.cache import BlockState, TTTCache
from ttt_adapt.models.ttt.configuration import TTTConfig
from ttt_adapt.models.ttt.mixers import make_mixer


class SwiGLU(nn.Module):
    """``(silu(x W_gate) · x W_up) W_down``."""

    def __init__(self, config: TTTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(hidden_BTC)) * self.up_proj(hidden_BTC)
        found: torch.Tensor = self.down_proj(gated)
        return found


class PreConvolution(nn.Module):
    """A short convolution over normalised inputs, ``conv(norm(x))``."""

    def __init__(self, config: TTTConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.conv = ShortConvolution(config.hidden_size, config.conv_kernel)

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        tail: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, T, C]`` and the tail ``[B, K - 1, C]``; padding is skipped, its output zero."""
        rows = None if attention_mask is None else rows_of_mask(attention_mask)
        normal = self.norm(hidden_BTC)
        read = normal if rows is None else rows.gather(normal)
        out = self.conv(read, tail)
        lengths = None if rows is None else rows.lengths
        after = convolution_tail(read, tail, self.conv.num_taps, lengths)
        return (out if rows is None else rows.scatter(out)), after


class TTTBlock(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """One residual block."""

    def __init__(self, config: TTTConfig, position: int) -> None:
        super().__init__()
        self.position = position
        self.layer_type = config.layer_types[position]
        self.mixer = make_mixer(config, self.layer_type)
        self.pre_conv = PreConvolution(config) if config.pre_conv else None
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: TTTCache | None = None,
    ) -> torch.Tensor:
        """``[B, T, C]`` to ``[B, T, C]``; what the cache holds of this block is brought up to date."""
        state = None if past_key_values is None else past_key_values.states[self.position]
        tail = None
        if self.pre_conv is not None:
            before = None if state is None else state.tail
            mixed, tail = self.pre_conv(hidden_BTC, attention_mask=attention_mask, tail=before)
            hidden_BTC = hidden_BTC + mixed
        mixed, after = self.mixer(
            self.mixer_norm(hidden_BTC),
            attention_mask=attention_mask,
            state=None if state is None else state.mixer,
            return_state=past_key_values is not None,
        )
        hidden_BTC = hidden_BTC + mixed
        if past_key_values is not None:
            past_key_values.states[self.position] = BlockState(after, tail)
        found: torch.Tensor = hidden_BTC + self.mlp(self.mlp_norm(hidden_BTC))
        return found


class TTTPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What the models share: their configuration, and how weights begin."""

    config_class = TTTConfig
    config: TTTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TTTBlock"]  # noqa: RUF012  read by the library as it is
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, (TTTLayer, ShortConvolution)):
            module.reset_parameters()
        elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)


class TTTModel(TTTPreTrainedModel):  # type: ignore[no-untyped-call]
    """Embeddings, blocks and the last norm."""

    def __init__(self, config: TTTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            TTTBlock(config, position) for position in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: TTTCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **refused: Any,
    ) -> Any:
        """Read tokens, from the beginning or on from a cache.

        Args:
            input_ids: int64 ``[B, T]``; or inputs_embeds: ``[B, T, C]``.
            attention_mask: ``[B, T]``, or ``[B, T_before + T]`` as generation has it: zero for
                padding, which is skipped wherever it stands.
            past_key_values: a cache to go on from; it is changed.
            use_cache: return a cache; ``None``: as configured. A cache that is given is returned.
            output_hidden_states: the embeddings' and each block's output too.

        Raises:
            ModelError: inputs that do not fit, or a cache of something else.
        """
        _require_nothing_else(refused)
        if (input_ids is None) == (inputs_embeds is None):
            raise ModelError("expected either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        wanted = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            wanted = False  # blocks that are computed again must not write twice
        cache = past_key_values
        if cache is None and wanted:
            cache = TTTCache(self.config)
        if cache is not None:
            if not isinstance(cache, TTTCache):
                raise ModelError(
                    f"expected past_key_values to be a TTTCache, found {type(cache).__name__}; "
                    "leave it out and the model makes one"
                )
            cache.require(self.config, hidden.shape[0])
        mask = _columns_of(attention_mask, hidden)
        states = [hidden]
        for block in self.layers:
            hidden = block(hidden, attention_mask=mask, past_key_values=cache)
            states.append(hidden)
        if cache is not None:
            ones = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
            cache.count(ones if mask is None else mask)
        hidden = states[-1] = self.norm(hidden)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        found = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        return found if return_dict is not False else found.to_tuple()


class TTTForCausalLM(TTTPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A causal language model of TTT layers, attention, or both.

        model = TTTForCausalLM(TTTConfig(hidden_size=256, num_attention_heads=4))
        model.generate(input_ids, attention_mask=mask, max_new_tokens=20)

    It saves, loads, generates and learns as any model of transformers does; its cache is a
    :class:`ttt_adapt.models.ttt.TTTCache`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TTTConfig) -> None:
        super().__init__(config)
        self.model = TTTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: TTTCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **refused: Any,
    ) -> Any:
        """Logits ``[B, T, V]``, and the loss where ``labels [B, T]`` are given (-100: not scored).

        Other arguments as in :meth:`TTTModel.forward`.

        Args:
            logits_to_keep: compute those of the last so many tokens only (0: all), or of these.
            num_items_in_batch: divide the summed loss by this instead of the labels' number.

        Raises:
            ModelError: inputs that do not fit, or a cache of something else.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **refused,
        )
        hidden = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        found = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return found if return_dict is not False else found.to_tuple()

    def set_base_lr(self, base_lr: float | None) -> None:
        """Set η_base of all TTT layers, as a warm-up of the outer loop does; ``None``: the
        configuration's."""
        for module in self.modules():
            if isinstance(module, TTTLayer):
                own = self.config.base_lr if base_lr is None else base_lr
                module.base_lr = module.default_base_lr if own is None else own

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> bool:
        """``generate`` begins with one of our caches."""
        if generation_config.cache_implementation is not None:
            raise ModelError(
                "expected no cache_implementation, found "
                f"{generation_config.cache_implementation!r}; this model has its own cache"
            )
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = TTTCache(self.config)
        elif given is not None:
            given._is_user_defined = True
        return True

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **options: Any
    ) -> dict[str, Any]:
        """``generate`` continues nothing that is not a number: greedy search would print token 0."""
        logits = outputs.logits[:, -1]
        if not bool(logits.isfinite().all()):
            rows = (~logits.isfinite().all(-1)).nonzero().flatten().tolist()
            raise ModelError(
                f"expected finite logits, found NaN or infinity in rows {rows[:8]}; check the "
                "model's weights (ttt_adapt.layers.diagnose shows the layer)"
            )
        parent: Any = super()
        found: dict[str, Any] = parent._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **options
        )
        return found


def _columns_of(mask: torch.Tensor | None, hidden_BTC: torch.Tensor) -> torch.Tensor | None:
    """bool ``[B, T]`` of these tokens; ``None`` if all are real.

    Raises:
        ModelError: a mask of another shape.
    """
    if mask is None:
        return None
    batch, num_tokens, _ = hidden_BTC.shape
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < num_tokens:
        raise ModelError(
            f"expected attention_mask [{batch}, {num_tokens}] or with the columns before, found "
            f"{list(mask.shape)}"
        )
    own = mask[:, mask.shape[1] - num_tokens :].to(hidden_BTC.device).bool()
    return None if bool(own.all()) else own


def _require_nothing_else(refused: dict[str, Any]) -> None:
    given = [name for name, value in refused.items() if value is not None and value is not False]
    if given:
        raise ModelError(
            f"expected arguments that TTTForCausalLM knows, found {', '.join(sorted(given))}; "
            "positions follow from attention_mask and the cache"
        )
