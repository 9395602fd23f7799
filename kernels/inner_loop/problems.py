"""Random problems for the operators of TTT layers, for tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ttt_adapt.kernels.inner_loop.state import FastWeightState
from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.kernels.ttt_mlp import ttt_mlp

OPERATORS = ("ttt_linear", "ttt_mlp")


@dataclass(frozen=True)
class Problem:
    """Inputs of one operator: tokens ``[B, T, ...]`` by name, and what all tokens share."""

    operator: str
    tokens: dict[str, torch.Tensor]
    shared: dict[str, torch.Tensor]
    mini_batch_size: int

    def run(self, **options: Any) -> tuple[torch.Tensor, FastWeightState | None]:
        function: Any = ttt_linear if self.operator == "ttt_linear" else ttt_mlp
        found: tuple[torch.Tensor, FastWeightState | None] = function(
            **self.tokens, **self.shared, mini_batch_size=self.mini_batch_size, **options
        )
        return found

    def part(self, first: int | None, last: int | None) -> "Problem":
        """The same problem on some of the tokens."""
        return replace(self, tokens={k: v[:, first:last] for k, v in self.tokens.items()})

    def to(self, dtype: torch.dtype) -> "Problem":
        """Tokens in another dtype; lr and what is shared stay in float32 or float64."""
        tokens = {k: v if k == "lr" else v.to(dtype) for k, v in self.tokens.items()}
        return replace(self, tokens=tokens)

    def float(self) -> "Problem":
        """Everything in float32."""
        return self.map(torch.Tensor.float)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Problem":
        """Every tensor changed."""
        return replace(
            self,
            tokens={k: change(v) for k, v in self.tokens.items()},
            shared={k: change(v) for k, v in self.shared.items()},
        )

    def leaves(self) -> dict[str, torch.Tensor]:
        """All inputs by name."""
        return {**self.tokens, **self.shared}

    def learnable(self) -> "Problem":
        """A copy whose inputs all require gradients."""
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())


def make_problem(
    operator: str,
    *,
    batch: int = 2,
    length: int = 21,
    heads: int = 2,
    width: int = 8,
    size: int = 4,
    hidden: int = 12,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Values of the size that a trained layer has."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = {name: normal(batch, length, heads, width) for name in ("q", "k", "v")}
    tokens["lr"] = normal(batch, length, heads).sigmoid() / width
    position = torch.arange(1, size + 1, dtype=torch.float64)
    shared = {
        "token_scale": (1 / position + 0.1 * normal(size).double()).clamp(min=0).to(dtype),
        "ln_weight": 1 + 0.1 * normal(heads, width),
        "ln_bias": 0.1 * normal(heads, width),
    }
    if operator == "ttt_linear":
        shared |= {"weight": 0.3 * normal(heads, width, width), "bias": 0.1 * normal(heads, width)}
    else:
        shared |= {
            "w1": 0.3 * normal(heads, width, hidden),
            "b1": 0.1 * normal(heads, hidden),
            "w2": 0.3 * normal(heads, hidden, width),
            "b2": 0.1 * normal(heads, width),
        }
    return Problem(operator, tokens, shared, size)
