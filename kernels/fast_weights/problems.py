"""Random problems for the operator, for tests and benchmarks."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ttt_adapt.kernels.fast_weights import InnerLearner, LearnerState, fast_weights

Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """Inputs of the operator by name: ``[B, T, H, ...]`` each, and what all tokens share."""

    learner: InnerLearner
    tokens: Leaves
    weights: tuple[torch.Tensor, ...]
    token_scale: torch.Tensor | None
    mini_batch_size: int

    def run(self, **options: Any) -> tuple[torch.Tensor, LearnerState | None]:
        function: Any = fast_weights
        found: tuple[torch.Tensor, LearnerState | None] = function(
            **self.tokens,
            learner=self.learner,
            weights=self.weights,
            token_scale=self.token_scale,
            mini_batch_size=self.mini_batch_size,
            **options,
        )
        return found

    def part(self, first: int, last: int) -> "Problem":
        """The same problem on some of the tokens."""
        return replace(self, tokens={k: x[:, first:last] for k, x in self.tokens.items()})

    def leaves(self) -> Leaves:
        """All inputs by name."""
        shared = {f"weights.{i}": weight for i, weight in enumerate(self.weights)}
        scale = {} if self.token_scale is None else {"token_scale": self.token_scale}
        return {**self.tokens, **shared, **scale}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Problem":
        """Every tensor changed."""
        return replace(
            self,
            tokens={k: change(x) for k, x in self.tokens.items()},
            weights=tuple(map(change, self.weights)),
            token_scale=None if self.token_scale is None else change(self.token_scale),
        )


def make_problem(
    learner: InnerLearner,
    extras: tuple[str, ...] = (),
    *,
    size: int = 4,
    length: int = 21,
    batch: int = 2,
    heads: int = 2,
    width: int = 5,
    seed: int = 0,
) -> Problem:
    """Values of the size that a trained layer has; extras name the optional tensors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lead, hidden = (batch, length, heads), width + 2
    linear = learner.model == "linear"
    shapes = {
        "decay": lead,
        "channel_decay": (*lead, width),
        "momentum": lead,
        "removal_strength": lead,
        "channel_removal_strength": (*lead, width),
    }
    tokens = {name: normal(*lead, width) for name in ("q", "k", "v")}
    tokens["k"] = torch.nn.functional.normalize(tokens["k"], dim=-1)
    tokens["lr"] = normal(*(lead if linear else (*lead, 3))).sigmoid()
    for extra in extras:
        if extra in shapes:
            tokens[extra.removeprefix("channel_")] = normal(*shapes[extra]).sigmoid()
        if extra.endswith("removal_strength"):
            tokens["removal_key"] = torch.nn.functional.normalize(normal(*lead, width), dim=-1)
    matrices = [(width, hidden), (hidden, width), (width, hidden)]
    return Problem(
        learner,
        tokens,
        tuple(0.3 * normal(heads, *one) for one in ([(width, width)] if linear else matrices)),
        normal(size).abs() if "token_scale" in extras else None,
        size,
    )


def extras_of(learner: InnerLearner) -> Iterator[tuple[str, ...]]:
    """Every set of optional tensors that a learner takes."""
    linear, by_token = learner.model == "linear", learner.step == "token"
    removals: list[tuple[str, ...]] = [()]
    if linear and learner.loss == "dot":
        removals += [("removal_strength",), ("channel_removal_strength",)]
    gates: list[tuple[str, ...]] = [(), ("decay",), ("momentum",), ("decay", "momentum")]
    gates += [("channel_decay",)] if linear else []
    gates += [("token_scale",)] if by_token else []
    gates += [("channel_decay", "momentum")] if linear and not by_token else []
    for gate, removal in itertools.product(gates, removals):
        yield (*gate, *removal)


def learners() -> Iterator[InnerLearner]:
    """Every model, loss, step and order; Muon and normalisation where they are defined."""
    for model, loss, order in itertools.product(
        ("linear", "swiglu"), ("l2", "dot"), ("update-then-apply", "apply-then-update")
    ):
        chosen: Any = {"model": model, "loss": loss, "order": order}
        yield InnerLearner(**chosen)
        yield InnerLearner(**chosen, step="mini-batch")
    yield InnerLearner(step="mini-batch", muon=True)
    yield InnerLearner(step="mini-batch", normalize=True)
    yield InnerLearner(model="swiglu", loss="dot", step="mini-batch", muon=True, normalize=True)
