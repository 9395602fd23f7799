"""TTT-Linear as it is before layer norm and residual: what its ablation begins with.

With one mini-batch, W0 = 0 and a fixed rate it is linear attention (Sun et al. 2024, arXiv
2407.04620, theorem 1).

Shape legend: B rows, T tokens, H heads, D head width, b tokens in a mini-batch.
"""

from typing import Any

import torch
from torch import nn

from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.plain import PLAIN, plain_fast_weights
from ttt_adapt.layers.ttt_layer import TTTLayer


class TTTPlainLinear(TTTLayer):
    """The hidden state of each head is ``f(x) = x W``; its loss is ``½‖f(k) − v‖²``.

    ``initial_weight [H, D, D]`` begins at N(0, 0.02²). A key's rate is ``base_lr · 2σ(w·x + bias)``,
    and a mini-batch's gradients are summed (token scale 1), as the paper's equations have it. The
    paper leaves the ½ out of its loss: its η = ½ is ``base_lr = 1``. Autograd does the backward pass.

    Args:
        learnable_w0: ``False``: sequences begin with W = 0, and the layer has no parameter for it.
        options: as :class:`TTTLayer` has them; ``backend`` changes nothing.

    Raises:
        ModelError: sizes that do not fit.
    """

    kind = "ttt_plain_linear"
    default_base_lr = 1.0
    has_inner_norm = False

    def __init__(
        self, hidden_size: int, num_heads: int, *, learnable_w0: bool = True, **options: Any
    ) -> None:
        self.learnable_w0 = learnable_w0
        super().__init__(hidden_size, num_heads, **options)

    def _make_initial_weights(self) -> None:
        if self.learnable_w0:
            shape = (self.num_heads, self.head_width, self.head_width)
            self.initial_weight = nn.Parameter(torch.empty(shape))

    def initial_weights(self) -> dict[str, torch.Tensor]:
        if self.learnable_w0:
            return {"weight": self.initial_weight}
        # Made when used: nothing that saving could lose.
        shape = (self.num_heads, self.head_width, self.head_width)
        return {"weight": self.q_proj.weight.new_zeros(shape)}

    def shared(self) -> dict[str, Any]:
        return {"token_scale": self.token_scale()}

    def full_rate(self) -> float:
        return 2.0 * self.base_lr

    def initial_token_scale(self, count: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(count)

    def _operate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lr: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, FastWeightState | None]:
        del options["backend"]
        # Nothing is refused here that is not finite, so there is nothing to turn off.
        options.pop("check_finite", None)
        weights = tuple(self.initial_weights().values())
        return plain_fast_weights(
            q, k, v, lr, inner=PLAIN["ttt-linear"], weights=weights, **options
        )
