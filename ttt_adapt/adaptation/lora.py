"""LoRA through PEFT: its layers are made once, swapped in for an episode, and never merged."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ttt_adapt.adaptation.low_rank import fuse
from ttt_adapt.adaptation.plastic import BufferGuard, require_learnable
from ttt_adapt.adaptation.working_copy import WorkingCopy
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.errors import SettingsError

_ADAPTER = "default"


class LoraWeights:
    """Low-rank updates of a model's linear layers.

    PEFT's layers wrap the model's own. Attaching puts the wrappers in the modules' places,
    detaching puts the originals back, so that between episodes the model is the original one,
    module by module. Each query starts from A drawn by its seed alone and B zero; adapters are
    float32, whatever the base's dtype.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """

    def __init__(self, model: nn.Module, settings: AdaptationSettings, name: str) -> None:
        require_learnable(list(model.parameters())[:1], name)
        self._parameters = list(model.parameters())
        self._flags = [p.requires_grad for p in self._parameters]
        originals = _children(model)
        known = set(vars(model))
        try:
            _inject(model, settings, name)
            self._swaps = [
                (owner, key, originals[owner_id, key], module)
                for (owner_id, key), module in _children(model).items()
                if module is not originals.get((owner_id, key))
                for owner in (_owner(model, owner_id),)
                if (owner_id, key) in originals
            ]
            named = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
            odd = [n for n, _ in named if ".lora_A." not in n and ".lora_B." not in n]
            if odd:
                raise SettingsError(
                    f"lora_targets must name linear layers of {name}, found one behind {odd[0]}"
                )
        finally:
            # Between episodes there is no trace of PEFT: modules, flags and attributes.
            _restore(model, originals)
            for parameter, flag in zip(self._parameters, self._flags, strict=True):
                parameter.requires_grad_(flag)
            for key in set(vars(model)) - known:
                delattr(model, key)
        for _, _, _, wrapper in self._swaps:
            fuse(wrapper, _ADAPTER)
        self._buffers = BufferGuard(model)
        self._attached = False
        self.leaves: Sequence[torch.Tensor] = [p for _, p in named]
        self._is_a = [".lora_A." in n for n, _ in named]
        self._working = WorkingCopy(self.leaves)
        self.masters: Sequence[torch.Tensor] = self._working.views
        for (_, parameter), view in zip(named, self.masters, strict=True):
            parameter.data = view
        self._start: tuple[int, list[torch.Tensor]] | None = None

    def reset(self, seed: int) -> None:
        if self._start is None or self._start[0] != seed:
            self._start = (seed, self._initial(seed))
        self._working.load(self._start[1])

    def attach(self) -> None:
        if self._attached:
            return
        self._attached = True
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        for owner, key, _, wrapper in self._swaps:
            owner._modules[key] = wrapper

    def detach(self) -> None:
        if not self._attached:
            return
        for owner, key, original, _ in self._swaps:
            owner._modules[key] = original
        for parameter, flag in zip(self._parameters, self._flags, strict=True):
            parameter.requires_grad_(flag)
        self._buffers.restore()
        self._attached = False

    def publish(self) -> None:
        """Nothing to do: the adapters are the masters."""

    def keep(self) -> None:
        self._working.keep()

    def is_finite(self) -> bool:
        return self._working.is_finite()

    def roll_back(self) -> None:
        self._working.roll_back()

    def close(self) -> None:
        self.detach()
        self._swaps = []

    def _initial(self, seed: int) -> list[torch.Tensor]:
        """A as PEFT draws it (Kaiming-uniform, a = √5), B zero; the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        values = []
        for leaf, is_a in zip(self.leaves, self._is_a, strict=True):
            value = torch.zeros(leaf.shape)
            if is_a:
                nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
            values.append(value.to(leaf.device))
        return values


def _inject(model: nn.Module, settings: AdaptationSettings, name: str) -> None:
    import peft
    from transformers.pytorch_utils import Conv1D

    config = peft.LoraConfig(
        r=settings.lora_rank,
        # PEFT divides it by the rank and takes any number, though it is annotated int.
        lora_alpha=cast(int, settings.lora_alpha),
        lora_dropout=0.0,
        target_modules=list(settings.lora_targets) or "all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # PEFT warns of merging into tied layers; nothing is ever merged here.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
        _inject_quietly(peft, config, model, settings, name)


def _inject_quietly(
    peft: Any, config: Any, model: nn.Module, settings: AdaptationSettings, name: str
) -> None:
    try:
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise SettingsError(
            f"lora_targets {list(settings.lora_targets) or 'all-linear'} do not fit {name}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error


_Children = dict[tuple[int, str], nn.Module]


def _children(model: nn.Module) -> _Children:
    """Every place a module holds another, by the holder's identity and the name within it."""
    return {
        (id(owner), key): child
        for owner in model.modules()
        for key, child in owner._modules.items()
        if child is not None
    }


def _owner(model: nn.Module, identity: int) -> Any:
    return next(module for module in model.modules() if id(module) == identity)


def _restore(model: nn.Module, originals: _Children) -> None:
    for owner in list(model.modules()):
        for key in list(owner._modules):
            if (id(owner), key) in originals:
                owner._modules[key] = originals[id(owner), key]
