"""TTT layers: sequence layers whose hidden state is a model that learns from each token it reads.

    layer = TTTLinear(hidden_size=256, num_heads=4)
    out, _ = layer(hidden)                                        # a whole sequence, from W0
    out, state = layer(first, return_state=True)                  # … or in parts of any length
    out, state = layer(second, state=state, return_state=True)

Sun et al. 2024, arXiv 2407.04620, sections 2.3 to 2.7, with the semantics of the public PyTorch
reference. The inner loop is an operator of :mod:`ttt_adapt.kernels`.

Shape legend: B rows, T tokens, C width, H heads, D head width, F hidden width of the inner MLP,
b tokens in a mini-batch.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ttt_adapt.errors import ModelError, OperatorInputError
from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.rows import rows_of_mask
from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.kernels.ttt_mlp import ttt_mlp
from ttt_adapt.layers.rotary import rotary_angles, rotate_pairs
from ttt_adapt.layers.short_convolution import ShortConvolution, convolution_tail
from ttt_adapt.layers.state import TTTState

INITIAL_STD = 0.02
"""Of weights, initial fast weights and learning-rate gates."""


class InnerTokens(NamedTuple):
    """What the inner loop learns from: ``q, k, v [B, T, H, D]``, ``lr [B, T, H]``, left-aligned
    rows, and which tokens are real (bool ``[B, T]``, ``None``: all)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lr: torch.Tensor
    real: torch.Tensor | None


class TTTLayer(nn.Module, ABC):
    """What TTT-Linear and TTT-MLP have in common: everything but the inner model.

    Args:
        hidden_size: C, a multiple of ``2 · num_heads``.
        num_heads: H; each has an inner model of its own.
        mini_batch_size: b, tokens per step of inner gradient descent.
        base_lr: η_base, the inner learning rate before its gate; ``None``: the paper's for this
            inner model. Kept in the attribute ``base_lr``, which may be set at any time (a warm-up
            of the inner rate, as the paper has it for TTT-MLP).
        rope_theta: base of the rotary positions within a mini-batch.
        use_gate: multiply the output by ``gelu(x W_g)`` (the Mamba backbone).
        share_qk: one projection for q and k, told apart by short convolutions (the Mamba backbone).
        conv_kernel: taps of those convolutions.
        learnable_lr: ``False``: the learning rate and the token scale keep the values that learned
            ones begin with.
        backend: of the operator: ``auto``, ``reference``, ``chunked`` or ``triton``.

    Attributes:
        probe: called with the layer, the inner tokens and the state before them, if set; see
            :func:`ttt_adapt.layers.diagnose`.

    Raises:
        ModelError: sizes that do not fit.
    """

    kind: ClassVar[str]
    default_base_lr: ClassVar[float]
    has_inner_norm: ClassVar[bool] = True
    """Whether the inner model is ``x + LN(f(x))``."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        mini_batch_size: int = 16,
        base_lr: float | None = None,
        rope_theta: float = 10_000.0,
        use_gate: bool = False,
        share_qk: bool = False,
        conv_kernel: int = 4,
        learnable_lr: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if hidden_size % (2 * num_heads):
            raise ModelError(
                f"expected hidden_size to be a multiple of 2 · num_heads ({2 * num_heads}), found "
                f"{hidden_size}; rotary positions turn pairs of a head's dimensions"
            )
        if mini_batch_size < 1:
            raise ModelError(f"expected mini_batch_size of at least 1, found {mini_batch_size}")
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_width = hidden_size // num_heads
        self.mini_batch_size = mini_batch_size
        self.base_lr = self.default_base_lr if base_lr is None else base_lr
        self.rope_theta, self.backend = rope_theta, backend
        self.share_qk, self.conv_kernel = share_qk, conv_kernel
        self.probe: Any = None

        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if share_qk:
            self.conv_q = ShortConvolution(hidden_size, conv_kernel)
            self.conv_k = ShortConvolution(hidden_size, conv_kernel)
        else:
            self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.g_proj = nn.Linear(hidden_size, hidden_size, bias=False) if use_gate else None
        self.post_norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.learnable_lr = learnable_lr
        if learnable_lr:
            self.lr_weight = nn.Parameter(torch.empty(num_heads, hidden_size))
            self.lr_bias = nn.Parameter(torch.empty(num_heads))
            self.token_scale_offset = nn.Parameter(torch.empty(mini_batch_size))
        if self.has_inner_norm:
            self.norm_weight = nn.Parameter(torch.empty(num_heads, self.head_width))
            self.norm_bias = nn.Parameter(torch.empty(num_heads, self.head_width))
        self._make_initial_weights()
        self.reset_parameters()

    @abstractmethod
    def _make_initial_weights(self) -> None:
        """Create the parameters a sequence begins with."""

    @abstractmethod
    def initial_weights(self) -> dict[str, torch.Tensor]:
        """W0 and b0 under the names the operator gives them; outer-loop parameters."""

    @abstractmethod
    def _operate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lr: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, FastWeightState | None]: ...

    def reset_parameters(self) -> None:
        """Initial values of the layer's own parameters; submodules have theirs."""
        for name, tensor in self.initial_weights().items():
            if not isinstance(tensor, nn.Parameter):
                continue  # fixed
            # Biases are [H, …], matrices [H, …, …].
            if tensor.ndim == 3:
                nn.init.normal_(tensor, std=INITIAL_STD)
            else:
                assert name.startswith("b"), name
                nn.init.zeros_(tensor)
        if self.learnable_lr:
            nn.init.normal_(self.lr_weight, std=INITIAL_STD)
            nn.init.zeros_(self.lr_bias)
            nn.init.zeros_(self.token_scale_offset)
        if self.has_inner_norm:
            nn.init.zeros_(self.norm_bias)
            nn.init.ones_(self.norm_weight)

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        state: TTTState | None = None,
        return_state: bool = False,
    ) -> tuple[torch.Tensor, TTTState | None]:
        """Read tokens, learning from each; answer each with what was learned up to it.

        Args:
            hidden_BTC: ``[B, T, C]``, T of any length.
            attention_mask: ``[B, T]`` of these T tokens, zero for padding wherever it stands: the
                others are read as if it were not there; its own output is zero.
            state: where to go on, of a call before; ``None``: at W0.
            return_state: whether to return the state after the last token.

        Returns:
            ``[B, T, C]`` and the state, or ``None``. Gradients flow through both states. NaN or
            infinity in a row make its outputs from that mini-batch on, and its state, NaN, as in any
            other layer: losses of NaN are what loops that learn outer weights look for.

        Raises:
            OperatorInputError: shapes that do not fit, or another layer's state.
        """
        rows = None
        if attention_mask is not None:
            if attention_mask.shape != hidden_BTC.shape[:2]:
                raise OperatorInputError(
                    f"{self.kind}: expected attention_mask {list(hidden_BTC.shape[:2])}, found "
                    f"{list(attention_mask.shape)}"
                )
            rows = rows_of_mask(attention_mask.to(hidden_BTC.device))
        hidden = hidden_BTC
        if rows is not None:
            # Behind a row's end stand tokens of its padding, which may hold anything.
            hidden = rows.gather(hidden_BTC).masked_fill(~rows.valid()[..., None], 0.0)
        q, k, v, projected = self._project(hidden, None if state is None else state.tail)
        position = self._positions(hidden, state)
        angles = rotary_angles(position, self.head_width, self.rope_theta)
        heads = (*q.shape[:2], self.num_heads, self.head_width)
        tokens = InnerTokens(
            rotate_pairs(q.view(heads), angles),
            rotate_pairs(k.view(heads), angles),
            v.view(heads),
            self.learning_rates(hidden),
            None if rows is None else rows.valid(),
        )
        fast = None if state is None else state.fast
        if self.probe is not None:
            self.probe(self, tokens, fast)
        out, fast = self.learn(tokens, fast, output_final_state=return_state)
        out = self.post_norm(out.flatten(2))
        if self.g_proj is not None:
            out = functional.gelu(self.g_proj(hidden), approximate="tanh") * out
        out = self.o_proj(out)
        found = None
        if fast is not None:
            lengths = None if rows is None else rows.lengths
            before = None if state is None else state.tail
            tail = (
                convolution_tail(projected, before, self.conv_kernel, lengths)
                if self.share_qk
                else None
            )
            found = TTTState(fast, tail)
        return (out if rows is None else rows.scatter(out)), found

    def learn(
        self, tokens: InnerTokens, fast: FastWeightState | None, *, output_final_state: bool
    ) -> tuple[torch.Tensor, FastWeightState | None]:
        """The inner loop alone: the operator with this layer's parameters, ``[B, T, H, D]``."""
        # Its states are float32 whatever the tokens are: autocast would round them.
        with torch.autocast(tokens.q.device.type, enabled=False):
            return self._operate(
                tokens.q,
                tokens.k,
                tokens.v,
                tokens.lr,
                **self.shared(),
                initial_state=fast,
                output_final_state=output_final_state,
                attention_mask=tokens.real,
                check_finite=False,
                backend=self.backend,
            )

    def shared(self) -> dict[str, Any]:
        """What all tokens of the operator share, by the names it has for them."""
        return {
            "token_scale": self.token_scale(),
            "ln_weight": self.norm_weight,
            "ln_bias": self.norm_bias,
            "mini_batch_size": self.mini_batch_size,
        }

    def full_rate(self) -> float:
        """The learning rate of an open gate."""
        return self.base_lr / self.head_width

    def learning_rates(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        """``base_lr · sigmoid(w·x + bias) / D``, ``[B, T, H]``: each key's learning rate."""
        dtype = torch.promote_types(hidden_BTC.dtype, torch.float32)
        if not self.learnable_lr:
            shape = (*hidden_BTC.shape[:2], self.num_heads)
            return hidden_BTC.new_full(shape, 0.5 * self.full_rate(), dtype=dtype)
        gate = functional.linear(hidden_BTC, self.lr_weight, self.lr_bias)
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return torch.sigmoid(gate) * self.full_rate()

    def token_scale(self) -> torch.Tensor:
        """``max(1 / (i + 1) + learned offset, 0)``, ``[b]``, by position in the mini-batch."""
        like: torch.Tensor = self.token_scale_offset if self.learnable_lr else self.q_proj.weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        count = torch.arange(1, self.mini_batch_size + 1, device=like.device, dtype=dtype)
        scale = self.initial_token_scale(count)
        return (scale + like.to(dtype)).clamp(min=0.0) if self.learnable_lr else scale

    def initial_token_scale(self, count: torch.Tensor) -> torch.Tensor:
        """For the first, second, … token of a mini-batch: the mean of the gradients so far."""
        return count.reciprocal()

    def _project(
        self, hidden: torch.Tensor, tail: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v ``[B, T, C]``, and what the short convolutions read."""
        projected = self.q_proj(hidden)
        v = self.v_proj(hidden)
        if not self.share_qk:
            return projected, self.k_proj(hidden), v, projected
        return self.conv_q(projected, tail), self.conv_k(projected, tail), v, projected

    def _positions(self, hidden: torch.Tensor, state: TTTState | None) -> torch.Tensor:
        """Positions within the mini-batch, ``[1 or B, T]``."""
        position = torch.arange(hidden.shape[1], device=hidden.device)[None]
        if state is not None:
            position = position + state.fast.num_open[:, None]
        return position % self.mini_batch_size

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, mini_batch_size={self.mini_batch_size}"


class TTTLinear(TTTLayer):
    """The hidden state of each head is ``f(x) = x W + b``; arguments as :class:`TTTLayer` has them.

    ``initial_weight [H, D, D]`` begins at N(0, 0.02²), ``initial_bias [H, D]`` at zero.
    """

    kind = "ttt_linear"
    default_base_lr = 1.0

    def _make_initial_weights(self) -> None:
        heads, width = self.num_heads, self.head_width
        self.initial_weight = nn.Parameter(torch.empty(heads, width, width))
        self.initial_bias = nn.Parameter(torch.empty(heads, width))

    def initial_weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self.initial_weight, "bias": self.initial_bias}

    def _operate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lr: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, FastWeightState | None]:
        weight, bias = self.initial_weight, self.initial_bias
        return ttt_linear(q, k, v, lr, weight=weight, bias=bias, **options)


class TTTMLP(TTTLayer):
    """The hidden state of each head is ``f(x) = gelu(x W1 + b1) W2 + b2`` with F = 4 D; arguments as
    :class:`TTTLayer` has them.

    ``initial_w1 [H, D, F]`` and ``initial_w2 [H, F, D]`` begin at N(0, 0.02²), ``initial_b1 [H, F]``
    and ``initial_b2 [H, D]`` at zero.
    """

    kind = "ttt_mlp"
    default_base_lr = 0.1

    def _make_initial_weights(self) -> None:
        heads, width = self.num_heads, self.head_width
        self.initial_w1 = nn.Parameter(torch.empty(heads, width, 4 * width))
        self.initial_b1 = nn.Parameter(torch.empty(heads, 4 * width))
        self.initial_w2 = nn.Parameter(torch.empty(heads, 4 * width, width))
        self.initial_b2 = nn.Parameter(torch.empty(heads, width))

    def initial_weights(self) -> dict[str, torch.Tensor]:
        return {
            "w1": self.initial_w1,
            "b1": self.initial_b1,
            "w2": self.initial_w2,
            "b2": self.initial_b2,
        }

    def _operate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lr: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, FastWeightState | None]:
        w1, b1, w2, b2 = self.initial_w1, self.initial_b1, self.initial_w2, self.initial_b2
        return ttt_mlp(q, k, v, lr, w1=w1, b1=b1, w2=w2, b2=b2, **options)
