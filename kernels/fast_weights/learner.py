"""What learns: the settings of an inner learner, the tokens it reads, what it leaves behind.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, Self, get_args

import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.carried import CarriedState

NAME = "fast_weights"

Model = Literal["linear", "swiglu"]
Loss = Literal["l2", "dot"]
Step = Literal["token", "mini-batch"]
Order = Literal["update-then-apply", "apply-then-update"]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerLearner:
    """What is learned from each token, and how.

    Raises:
        OperatorInputError: an unknown value, or settings that exclude each other.
    """

    model: Model = "linear"
    """``f(x) = x W``, or SwiGLU: ``f(x) = (silu(x W1) ∘ (x W3)) W2``."""
    loss: Loss = "l2"
    """``½‖f(k) − v‖²``, or ``−f(k) · v``. Papers that leave the ½ out have half our lr."""
    step: Step = "token"
    """The weights move after each token, or once at the mini-batch's end. Gradients are those at the
    mini-batch's start either way."""
    order: Order = "update-then-apply"
    """A token is answered by the weights after its step (of its mini-batch, if that is the step), or
    before it."""
    muon: bool = False
    """A step is orthogonalised by Newton-Schulz iterations; ``step="mini-batch"`` only."""
    normalize: bool = False
    """After a step every output channel's weights get the L2 norm they had where the sequence began;
    ``step="mini-batch"`` only."""

    def __post_init__(self) -> None:
        choices = {"model": Model, "loss": Loss, "step": Step, "order": Order}
        for field, choice in choices.items():
            found = getattr(self, field)
            if found not in get_args(choice):
                raise OperatorInputError(
                    f"{NAME}: expected {field} of {', '.join(get_args(choice))}, found {found!r}"
                )
        for field in ("muon", "normalize"):
            if getattr(self, field) and self.step == "token":
                raise OperatorInputError(
                    f"{NAME}: expected step='mini-batch' with {field}, found step='token'; one "
                    "step a mini-batch is what it is defined for"
                )

    @property
    def num_weights(self) -> int:
        return 1 if self.model == "linear" else 3

    @property
    def causal(self) -> bool:
        """Whether no token is answered by weights that have read later tokens."""
        return self.step == "token" or self.order == "apply-then-update"


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the learner reads; ``[B, T, H, ...]`` each, or ``None`` where a setting is not used.

    Attributes:
        k, v: ``[B, T, H, D]``.
        lr: ``[B, T, H, M]``, M matrices.
        decay: ``[B, T, H]``, or for each channel ``[B, T, H, D]``.
        momentum: ``[B, T, H]``.
        removal_key: ``[B, T, H, D]``; removal_strength: ``[B, T, H, D]``.
    """

    k: torch.Tensor
    v: torch.Tensor
    lr: torch.Tensor
    decay: torch.Tensor | None = None
    momentum: torch.Tensor | None = None
    removal_key: torch.Tensor | None = None
    removal_strength: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.k.shape[1])

    def named(self) -> dict[str, torch.Tensor]:
        """Those that are used."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, **{name: change(tensor) for name, tensor in self.named().items()})

    def part(self, first: int, last: int) -> Self:
        """Tokens ``first`` to ``last``."""
        return self.map(lambda tensor: tensor[:, first:last])

    def after(self, earlier: "Tokens") -> Self:
        """These tokens with ``earlier`` ones before them."""
        before = earlier.named()
        return replace(
            self,
            **{
                name: torch.cat([before[name].to(tensor.dtype), tensor], dim=1)
                for name, tensor in self.named().items()
            },
        )


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What goes from one mini-batch to the next, float32 (float64 for float64 inputs).

    Attributes:
        weights: ``(W [B, H, D, D],)``, or ``(W1 [B, H, D, F], W2 [B, H, F, D], W3 [B, H, D, F])``.
        momentum: S, like the weights; empty without momentum.
        norms: of the output channels where the sequence began, ``[B, H, 1, out]`` for each matrix;
            empty unless the learner normalizes.
    """

    weights: Tensors
    momentum: Tensors = ()
    norms: Tensors = ()

    def to(self, dtype: torch.dtype) -> Self:
        return replace(
            self,
            weights=tuple(tensor.to(dtype) for tensor in self.weights),
            momentum=tuple(tensor.to(dtype) for tensor in self.momentum),
            norms=tuple(tensor.to(dtype) for tensor in self.norms),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LearnerState(CarriedState):
    """What a sequence of any length leaves behind.

    Attributes:
        carried: weights, momentum and norms at the start of the open mini-batch.
        open_tokens: that mini-batch's tokens so far, at most b − 1, as they were given (their
            queries are not needed any more); ``None`` where there are none.
    """

    carried: Carried
    open_tokens: Tokens | None = None

    @property
    def weights(self) -> Tensors:
        return self.carried.weights

    @property
    def num_rows(self) -> int:
        return int(self.weights[0].shape[0])

    @property
    def num_open(self) -> int:
        """Tokens in the open mini-batch."""
        return 0 if self.open_tokens is None else self.open_tokens.num_tokens

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The state with every tensor changed."""
        return self.from_tensors({name: change(t) for name, t in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors, as safetensors wants them; :meth:`from_tensors` is the way back."""
        named = {
            f"{field.name}.{i}": tensor
            for field in fields(Carried)
            for i, tensor in enumerate(getattr(self.carried, field.name))
        }
        tokens = {} if self.open_tokens is None else self.open_tokens.named()
        return named | {f"open.{name}": tensor for name, tensor in tokens.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """The state that :meth:`tensors` described."""

        def group(name: str) -> Tensors:
            count = sum(key.startswith(f"{name}.") for key in tensors)
            return tuple(tensors[f"{name}.{i}"] for i in range(count))

        tokens = {
            key.removeprefix("open."): tensor
            for key, tensor in tensors.items()
            if key.startswith("open.")
        }
        carried = Carried(*(group(field.name) for field in fields(Carried)))
        return cls(carried, Tokens(**tokens) if tokens else None)


Core = Callable[
    [InnerLearner, torch.Tensor, Tokens, torch.Tensor | None, Carried, int],
    tuple[torch.Tensor, Carried],
]
"""``core(learner, q, tokens, token_scale, carried, mini_batch_size) -> (out, carried)``.

Tokens begin at a mini-batch's first one, in the dtype of the weights; ``q [B, n, H, D]`` are the
queries of the last n of them. ``out [B, n, H, D]``; carried out is what the open mini-batch starts
with, or, when the learner is not causal, what the last token leaves. Differentiable in everything;
inputs are not changed.
"""
