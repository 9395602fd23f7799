"""``mttt``: one layer's inner loops, between the projections into heads and the one out of them.

Shape legend: B images, N heads, T tokens, d head width, D width, F hidden width, S steps.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.vision.inner_loop.causal import by_operator, fits_operator, in_order
from ttt_adapt.vision.inner_loop.closed_form import as_values, joined, parted, quadratic_step
from ttt_adapt.vision.inner_loop.descent import Examples, mean_loss, partition, step
from ttt_adapt.vision.inner_loop.learners import Layer, Layers, Learner, LearnerName, learner_named
from ttt_adapt.vision.inner_loop.precision import full_precision
from ttt_adapt.vision.inner_loop.reconstruction import Decoder, Norm, Reconstruction

Strategy = Literal["full", "sgd", "minibatch", "online"]
Normalizer = Literal["n", "n*d", "1"]
Recorder = Callable[[torch.Tensor], None]

STRATEGIES = ("full", "sgd", "minibatch", "online")
NORMALIZERS = ("n", "n*d", "1")


def mttt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    targets: torch.Tensor,
    weights: Sequence[torch.Tensor] | None = None,
    *,
    learner: LearnerName = "linear",
    strategy: Strategy = "full",
    steps: int = 1,
    mini_batch_size: int = 16,
    eta: float | Sequence[float] = 1.0,
    normalizer: Normalizer = "n",
    decoder: Decoder | None = None,
    residual: bool = False,
    feature_norm: Norm | None = None,
    rates: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    closed_form: bool = True,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """Learn to reconstruct ``targets`` from ``keys``, then answer ``queries``: ``f(q; W_T)``.

    Each head of each image starts at W0 and descends ``ℓ(W) = 1/(2n) Σ_j ‖g(f(k_j; W)) − target_j‖²``
    (MTTT, equations 1 to 3; ``reconstruction.py`` has f and g). With a linear learner, ``weights=None``
    and the defaults the result is linear attention.

    Args:
        queries: ``[B, N, T, d]``, any float dtype; keys alike. Computed in float32 (float64 for
            float64), also under autocast.
        targets: with a decoder the tokens ``[B, T, D]``, without one values ``[B, N, T, d]``.
        weights: W0, ``weight [N, d, d]`` or ``weight, bias [N, d]``; for the MLP ``w1 [N, d, F],
            w2 [N, F, d]`` or ``w1, b1, w2, b2``. ``None``: zero, for the linear learner alone (zero
            weights give a perceptron no gradient).
        learner: ``linear`` or ``mlp``.
        strategy: ``full``: ``steps`` steps on all tokens; ``sgd``: one step on each of ``steps`` random
            mini-batches; ``minibatch``: causal mini-batches of ``mini_batch_size``; ``online``: those of
            one token (serial: slow).
        steps: T of ``full`` and ``sgd``; 0 answers with W0.
        mini_batch_size: of ``minibatch``.
        eta: η, or one for each step of ``full`` and ``sgd``.
        normalizer: what the summed loss of a step's n tokens is divided by: ``n`` (the paper), ``n*d``
            (the public JAX code) or ``1``. In causal mini-batches, n is ``mini_batch_size``.
        decoder: g, from a head's features to the tokens; ``None``: the identity, targets are values.
        residual: ``f(x) = x + ...``.
        feature_norm: of the learner's output within f.
        rates: ``[B, N, T]``, factors of the tokens' losses; ``None``: ones.
        generator: the order of ``sgd``, on the CPU; ``None``: torch's own.
        closed_form: take the linear learner's steps in closed form where its loss is quadratic
            (``False``: as any other learner's; the result is the same but for rounding).
        recorder: called once with losses ½‖·‖², normalised: for ``full`` and ``sgd`` over all tokens
            before each step and after the last, ``[S + 1, B, N]``; for causal ones each token's before
            its mini-batch's step, ``[T, B, N]``.

    Returns:
        ``[B, N, T, d]`` in the dtype of ``queries``, differentiable in everything that is a tensor.

    Raises:
        OperatorInputError: shapes or options that do not fit.
    """
    model = learner_named(learner)
    problem = Reconstruction(residual, feature_norm, decoder)
    _check_options(strategy, normalizer, steps, mini_batch_size)
    _check_shapes(queries, keys, targets, problem, rates)
    if weights is None and learner != "linear":
        raise OperatorInputError(
            f"mttt: expected weights for the learner {learner!r}, found none; only a linear learner "
            "starts from zero"
        )
    rates_of_steps = step_rates(eta, steps, strategy)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    with full_precision(queries.device):
        q, k, y = (tensor.to(dtype) for tensor in (queries, keys, targets))
        examples = Examples(
            k,
            y[:, None] if decoder is not None and y.ndim == 3 else y,
            None if rates is None else rates.to(dtype),
        )
        problem = _cast(problem, dtype)
        layers = None if weights is None else model.layers([w.to(dtype) for w in weights])
        if layers is not None:
            _check_layers(layers, queries.shape[1], queries.shape[3])
        loop = _Loop(model, problem, normalizer, closed_form, recorder)
        if strategy in ("minibatch", "online"):
            size = mini_batch_size if strategy == "minibatch" else 1
            out = loop.causal(layers, q, examples, size, rates_of_steps[0])
        else:
            out = loop.descend(layers, q, examples, rates_of_steps, strategy, generator)
    return out.to(queries.dtype)


def step_rates(eta: float | Sequence[float], steps: int, strategy: str) -> tuple[float, ...]:
    """η of each step.

    Raises:
        OperatorInputError: another number of them than steps.
    """
    count = 1 if strategy in ("minibatch", "online") else steps
    if isinstance(eta, (int, float)):
        return (float(eta),) * count
    if len(eta) != count:
        raise OperatorInputError(
            f"mttt: expected one eta, or one for each of {count} steps, found {len(eta)}"
        )
    return tuple(float(rate) for rate in eta)


def takes_closed_form(model: Learner, problem: Reconstruction, closed_form: bool) -> bool:
    """Whether descent goes through d × d matrices."""
    return closed_form and model.name == "linear" and problem.quadratic


class _Loop:
    """The strategies on checked inputs; ``layers`` ``None`` is a linear learner of zero."""

    def __init__(
        self,
        model: Learner,
        problem: Reconstruction,
        normalizer: str,
        closed_form: bool,
        recorder: Recorder | None,
    ) -> None:
        self.model, self.problem, self.normalizer = model, problem, normalizer
        self.closed_form, self.recorder = closed_form, recorder

    def divisor(self, num_tokens: int, width: int) -> int:
        return {"n": num_tokens, "n*d": num_tokens * width, "1": 1}[self.normalizer]

    def descend(
        self,
        layers: Layers | None,
        q: torch.Tensor,
        examples: Examples,
        rates: tuple[float, ...],
        strategy: str,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """T steps on all tokens or on T parts of them, then f(q; W_T)."""
        _, heads, num_tokens, width = examples.keys.shape
        if strategy == "sgd" and len(rates) > num_tokens:
            raise OperatorInputError(
                f"mttt: expected at most {num_tokens} steps of SGD for {num_tokens} tokens, found "
                f"{len(rates)}"
            )
        orders: list[torch.Tensor | None] = [None] * len(rates)
        if strategy == "sgd" and len(rates) > 1:
            orders = list(partition(num_tokens, heads, len(rates), generator, q.device))
        linear = bool(rates) and takes_closed_form(self.model, self.problem, self.closed_form)
        biased = layers is not None and layers[0].bias is not None
        source, metric = examples, None
        if linear:
            alone = layers is None and len(rates) == 1
            source, metric = as_values(examples, self.problem, biased=biased, first_alone=alone)
        found, losses = layers, [self._mean_loss(layers, examples)]
        for rate, order in zip(rates, orders, strict=True):
            part = source if order is None else source.pick(order)
            scaled = rate / self.divisor(part.keys.shape[2], width)
            if linear:
                weight = joined(None if found is None else found[0])
                stepped = quadratic_step(weight, part, metric, scaled)
                found = (parted(stepped, biased=biased),)
            else:
                start = self._start(found, examples)
                found = step(self.model, start, part, self.problem, scaled)
            losses.append(self._mean_loss(found, examples))
        if self.recorder is not None:
            divisor = self.divisor(num_tokens, width) / num_tokens
            self.recorder(torch.stack([loss for loss in losses if loss is not None]) / divisor)
        out = torch.zeros_like(q) if found is None else self.model(found, q)
        return self.problem.features(q, out)

    def causal(
        self,
        layers: Layers | None,
        q: torch.Tensor,
        examples: Examples,
        size: int,
        rate: float,
    ) -> torch.Tensor:
        """Mini-batches in the tokens' order."""
        scaled = rate / self.divisor(size, q.shape[-1])
        start = self._start(layers, examples)
        operator = self.closed_form and fits_operator(start, self.problem)
        if self.recorder is not None:
            losses: list[torch.Tensor] = []
            with torch.no_grad():
                in_order(
                    self.model, start, None, examples, self.problem, size, scaled, losses
                )  # fmt: skip
            width = q.shape[-1] if self.normalizer == "n*d" else 1
            self.recorder(torch.cat(losses, dim=-1).permute(2, 0, 1) / width)
        if operator:
            return by_operator(self.model, start, q, examples, self.problem, size, scaled)
        out = in_order(self.model, start, q, examples, self.problem, size, scaled)
        assert out is not None, "there are queries"
        return out

    def _start(self, layers: Layers | None, examples: Examples) -> Layers:
        if layers is not None:
            return layers
        _, heads, _, width = examples.keys.shape
        return (Layer(examples.keys.new_zeros(heads, width, width), None),)

    def _mean_loss(self, layers: Layers | None, examples: Examples) -> torch.Tensor | None:
        if self.recorder is None:
            return None
        with torch.no_grad():
            return mean_loss(self.model, self._start(layers, examples), examples, self.problem)


def _cast(problem: Reconstruction, dtype: torch.dtype) -> Reconstruction:
    def norm(given: Norm | None) -> Norm | None:
        return None if given is None else Norm(*(tensor.to(dtype) for tensor in given))

    decoder = problem.decoder
    if decoder is not None:
        bias = None if decoder.bias is None else decoder.bias.to(dtype)
        decoder = Decoder(decoder.weight.to(dtype), bias, norm(decoder.norm))
    return Reconstruction(problem.residual, norm(problem.feature_norm), decoder)


def _check_options(strategy: str, normalizer: str, steps: int, mini_batch_size: int) -> None:
    for name, found, known in (
        ("strategy", strategy, STRATEGIES),
        ("normalizer", normalizer, NORMALIZERS),
    ):
        if found not in known:
            raise OperatorInputError(
                f"mttt: expected a {name} of {', '.join(known)}, found {found!r}"
            )
    if steps < 0:
        raise OperatorInputError(f"mttt: expected steps of at least 0, found {steps}")
    if mini_batch_size < 1:
        raise OperatorInputError(
            f"mttt: expected a mini_batch_size of at least 1, found {mini_batch_size}"
        )


def _check_shapes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    targets: torch.Tensor,
    problem: Reconstruction,
    rates: torch.Tensor | None,
) -> None:
    if queries.ndim != 4 or 0 in queries.shape:
        raise OperatorInputError(
            f"mttt: expected queries [B, N, T, d] with at least one of each, found "
            f"{list(queries.shape)}"
        )
    batch, heads, num_tokens, width = queries.shape
    expected: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
        "keys": (keys, (batch, heads, num_tokens, width))
    }
    if problem.decoder is None:
        expected["targets"] = (targets, (batch, heads, num_tokens, width))
    else:
        wide = problem.decoder.weight.shape[-1]
        expected["decoder.weight"] = (problem.decoder.weight, (heads, width, wide))
        expected["targets"] = (targets, (batch, num_tokens, wide))
    if rates is not None:
        expected["rates"] = (rates, (batch, heads, num_tokens))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape):
            raise OperatorInputError(
                f"mttt: expected {name} {list(shape)}, found {list(tensor.shape)}"
            )


def _check_layers(layers: Layers, heads: int, width: int) -> None:
    """Each layer reads what the one before gives, and the last gives a head's width."""
    wide = width
    for place, layer in enumerate(layers):
        given = width if layer is layers[-1] else int(layer.weight.shape[-1])
        expected: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
            "weight": (layer.weight, (heads, wide, given))
        }
        if layer.bias is not None:
            expected["bias"] = (layer.bias, (heads, given))
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise OperatorInputError(
                    f"mttt: expected {name} {list(shape)} in layer {place + 1} of the learner, "
                    f"found {list(tensor.shape)}"
                )
        wide = given
