"""Layers of a transformers ``Cache`` that hold fast weights, alone or beside keys and values.

A converted layer puts its own kind of layer into whatever dynamic cache it is handed, so that
``generate``, beam search and hand-written loops need not know what was converted.
"""

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ttt_adapt.errors import ModelError
from ttt_adapt.kernels.inner_loop.state import FastWeightState


class FastWeightLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What a converted layer has read so far: its state, and how many tokens, padding included."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state: FastWeightState | None = None
        self.num_seen = 0

    def store(self, state: FastWeightState, num_tokens: int) -> None:
        """Take up the state after ``num_tokens`` more tokens."""
        self.state = state
        self.num_seen += num_tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise ModelError(_NO_KEYS)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise ModelError(_NO_KEYS)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.num_open.device
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        if self.state is not None and hasattr(self, "device"):
            self.state = self.state.to(self.device)

    def reset(self) -> None:
        self.state, self.num_seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor[indices.to(tensor.device)])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ModelError(_NO_CROP)


class GatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of attention that stays, and the fast weights beside it."""

    is_croppable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self.fast_weights = FastWeightLayer()

    def reset(self) -> None:
        super().reset()
        self.fast_weights.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.fast_weights.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.fast_weights.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.fast_weights.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        self.fast_weights.crop(tokens_to_remove)


class GatedSlidingLayer(GatedLayer, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """As :class:`GatedLayer`, for attention that sees a sliding window."""

    is_sliding = True


def fast_weight_layer(cache: Any, index: int, *, gated: bool) -> FastWeightLayer:
    """The fast weights of layer ``index`` in ``cache``; put there if the layer holds nothing yet.

    Raises:
        ModelError: no dynamic cache, or one that another model has filled.
    """
    if not isinstance(cache, Cache):
        raise ModelError(
            f"expected past_key_values of transformers' Cache, found {type(cache).__name__}; "
            "leave it out, or pass a DynamicCache"
        )
    layers: list[Any] = cache.layers
    while len(layers) <= index and cache.layer_class_to_replicate is not None:
        layers.append(cache.layer_class_to_replicate())
    found: Any = layers[index] if index < len(layers) else None
    if isinstance(found, FastWeightLayer) and not gated:
        return found
    if isinstance(found, GatedLayer) and gated:
        return found.fast_weights
    if type(found) not in (DynamicLayer, DynamicSlidingWindowLayer) or found.is_initialized:
        raise ModelError(
            f"expected a dynamic cache that this model has filled, or an empty one, found "
            f"{type(found).__name__} at layer {index}; pass a new DynamicCache"
        )
    if not gated:
        alone = FastWeightLayer()
        layers[index] = alone
        return alone
    sliding = isinstance(found, DynamicSlidingWindowLayer)
    beside = GatedSlidingLayer(sliding_window=found.sliding_window) if sliding else GatedLayer()
    layers[index] = beside
    return beside.fast_weights


_NO_KEYS = "a layer of fast weights holds no keys and values; pass a new DynamicCache"
_NO_CROP = (
    "fast weights cannot forget tokens they have read; generate without an assistant model, or "
    "read the shorter text anew"
)
