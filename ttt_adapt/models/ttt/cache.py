"""What a language model of TTT layers remembers: a state for each block, as ``generate`` wants it.

    cache = model(input_ids=prefix, use_cache=True).past_key_values
    again = cache.clone()                       # read once, continue many times
    again.batch_repeat_interleave(8)            # … for eight rows
    model(input_ids=queries, past_key_values=again)
    cache.save("prefix.safetensors", fingerprint=lm.fingerprint)

A pure TTT model's cache is of constant size, whatever was read. Rows may have read different
numbers of tokens, at any offset in their mini-batch.

Shape legend: B rows.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Cache

from ttt_adapt.errors import FingerprintMismatchError, ModelError
from ttt_adapt.layers import LinearAttentionState, TTTState
from ttt_adapt.models.ttt.attention import AttentionState
from ttt_adapt.models.ttt.configuration import TTTConfig
from ttt_adapt.storage import atomic_path

FORMAT = "ttt-adapt cache 1"


MixerState = TTTState | AttentionState | LinearAttentionState

_STATES: dict[str, type[MixerState]] = {
    "attention": AttentionState,
    "linear_attention": LinearAttentionState,
    "ttt_linear": TTTState,
    "ttt_mlp": TTTState,
}


@dataclass(frozen=True, slots=True, eq=False)
class BlockState:
    """What one block remembers: its mixer's state, and the inputs its own convolution reaches
    (``pre_conv``; ``[B, K - 1, C]``)."""

    mixer: MixerState
    tail: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "BlockState":
        tail = None if self.tail is None else change(self.tail)
        return BlockState(self.mixer.map(change), tail)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"mixer.{name}": tensor for name, tensor in self.mixer.tensors().items()}
        return found if self.tail is None else {**found, "tail": self.tail}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], layer_type: str) -> "BlockState":
        mixer = {k.removeprefix("mixer."): v for k, v in tensors.items() if k.startswith("mixer.")}
        return cls(_STATES[layer_type].from_tensors(mixer), tensors.get("tail"))


class TTTCache(Cache):
    """States of all blocks, changed in place by the model's forward passes.

    Args:
        config: of the model it is for.

    Attributes:
        states: for each block its :class:`BlockState`, or ``None`` before the first token.
        num_tokens: int64 ``[B]``, tokens each row has read, padding not counted; ``None`` before.
        num_columns: columns of ``input_ids`` read, padding counted: what ``generate`` slices by.
    """

    def __init__(self, config: TTTConfig) -> None:
        super().__init__(layers=[])
        self.key = config.cache_key()
        self.states: list[BlockState | None] = [None] * config.num_hidden_layers
        self.num_tokens: torch.Tensor | None = None
        self.num_columns = 0

    def count(self, real_BT: torch.Tensor) -> None:
        """Note that a forward pass read these columns; bool ``[B, T]``, false for padding."""
        read = real_BT.sum(1)
        self.num_tokens = read if self.num_tokens is None else self.num_tokens + read
        self.num_columns += real_BT.shape[1]

    def begin_here(self) -> None:
        """Make what was read a beginning: ``generate`` then takes its ``input_ids`` as new tokens,
        instead of taking them as the whole text, the tokens read included."""
        self.num_columns = 0

    def require(self, config: TTTConfig, num_rows: int) -> None:
        """Refuse to go on with another model or another batch.

        Raises:
            FingerprintMismatchError: the cache is of a model of another shape.
            ModelError: it has other rows.
        """
        if self.key != config.cache_key():
            raise FingerprintMismatchError(
                "expected a cache made by this model, found one of a model of another shape; read "
                "the text again with this model"
            )
        if self.num_tokens is not None and self.batch_size != num_rows:
            raise ModelError(
                f"expected as many rows as the cache has ({self.batch_size}), found {num_rows}; "
                "use batch_repeat_interleave or batch_select_indices on it"
            )

    def clone(self) -> Self:
        """A copy with tensors of its own."""
        return self._copied(torch.Tensor.clone)

    def detach(self) -> Self:
        """A copy that shares tensors and through which no gradient flows."""
        return self._copied(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """A copy on another device."""
        return self._copied(lambda tensor: tensor.to(device))

    def is_finite(self) -> bool:
        """Whether no state holds NaN or infinity."""
        tensors = (tensor for tensor in self.tensors().values() if tensor.is_floating_point())
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name."""
        found = {
            f"blocks.{position}.{name}": tensor
            for position, state in enumerate(self.states)
            if state is not None
            for name, tensor in state.tensors().items()
        }
        return found if self.num_tokens is None else {**found, "num_tokens": self.num_tokens}

    def save(self, path: Path | str, *, fingerprint: str) -> None:
        """Write to a safetensors file, whole or not at all.

        Args:
            fingerprint: of the model, as :class:`ttt_adapt.models.LanguageModel` has it.

        Raises:
            ModelError: nothing was read, or the state is not finite.
        """
        if self.num_tokens is None:
            raise ModelError("expected a cache that has read something, found an empty one")
        if not self.is_finite():
            raise ModelError("expected a cache of finite values, found NaN or infinity in it")
        metadata = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "key": self.key,
            "num_columns": json.dumps(self.num_columns),
        }
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors().items()}
        with atomic_path(Path(path)) as temporary:
            save_file({k: v.clone() for k, v in tensors.items()}, temporary, metadata)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        config: TTTConfig,
        fingerprint: str,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            config: of the model that will go on with it; fingerprint: that model's.
            device: where its tensors should be.

        Raises:
            ModelError: no such file, or not a cache.
            FingerprintMismatchError: another model's cache.
        """
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as stream:
                metadata: dict[str, str] = stream.metadata() or {}
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read as a saved cache: {error}") from None
        if metadata.get("format") != FORMAT:
            raise ModelError(
                f"{path}: expected a cache of format {FORMAT!r}, found "
                f"{metadata.get('format', 'none')!r}; write it with TTTCache.save"
            )
        if (metadata["fingerprint"], metadata["key"]) != (fingerprint, config.cache_key()):
            raise FingerprintMismatchError(
                f"{path}: expected a cache of the model given ({fingerprint[:12]}), found one of "
                f"another ({metadata['fingerprint'][:12]}); read the text again with this model"
            )
        found = cls(config)
        for position, layer_type in enumerate(config.layer_types):
            prefix = f"blocks.{position}."
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            found.states[position] = BlockState.from_tensors(own, layer_type)
        found.num_tokens = tensors["num_tokens"]
        found.num_columns = int(json.loads(metadata["num_columns"]))
        return found

    # What transformers asks of a cache.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in another order, as beam search wants it."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be taken many times."""
        self._change(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other."""
        self._change(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget everything."""
        self.states = [None] * len(self.states)
        self.num_tokens, self.num_columns = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: fast weights cannot unlearn.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"cannot take {abs(tokens_to_remove)} tokens back out of fast weights; keep a clone() "
            "of the cache from before them"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.num_tokens is not None

    def update(self, *_: Any, **__: Any) -> Any:
        raise ModelError("expected a model of TTTForCausalLM to use this cache, found another")

    @property
    def batch_size(self) -> int:
        return -1 if self.num_tokens is None else int(self.num_tokens.shape[0])

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"TTTCache({len(self)} blocks, {self.batch_size} rows, {self.num_columns} columns)"

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.states = [None if state is None else state.map(change) for state in self.states]
        if self.num_tokens is not None:
            self.num_tokens = change(self.num_tokens)

    def _copied(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        found = self.__class__.__new__(self.__class__)
        found.__dict__.update(self.__dict__)
        found._change(change)
        return found
