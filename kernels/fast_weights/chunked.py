"""Fast forms in PyTorch: many tokens at once, time linear in T forward and backward.

With ``step="token"`` a linear learner is one scan (``scan.py``) while its mini-batches are short.
Long ones, and SwiGLU, are taken one after the other: what their tokens write follows from the weights
they start with, and then each matrix is a scan of known writes (the dual form of Sun et al. 2024,
arXiv 2407.04620, section 2.5 and appendix A). With ``step="mini-batch"`` there is one step, and one
set of weights to read, a mini-batch (Zhang et al. 2025, arXiv 2505.23884, section 3).

Shape legend: B rows, T tokens, H heads, D head width, b tokens in a mini-batch.
"""

import torch
from torch.nn import functional

from ttt_adapt.kernels.fast_weights.forgetting import When
from ttt_adapt.kernels.fast_weights.learner import Carried, InnerLearner, Tensors, Tokens
from ttt_adapt.kernels.fast_weights.models import apply, linear_writes, writes
from ttt_adapt.kernels.fast_weights.scan import CHUNK_SIZE, Gates, Layer, scan
from ttt_adapt.kernels.fast_weights.steps import orthogonalize, with_norms

After = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What was read ``[B, H, T, E]``, and a matrix and its momentum after it."""


def core(
    learner: InnerLearner,
    q: torch.Tensor,
    tokens: Tokens,
    token_scale: torch.Tensor | None,
    carried: Carried,
    mini_batch_size: int,
) -> tuple[torch.Tensor, Carried]:
    """The core contract (see ``learner.py``)."""
    earlier = tokens.num_tokens - q.shape[1]
    queries = q.transpose(1, 2)
    by_head = tokens.map(lambda tensor: tensor.transpose(1, 2))
    if learner.step == "mini-batch":
        out, end = _mini_batch_steps(learner, queries, by_head, carried, mini_batch_size)
        return out.transpose(1, 2), end
    queries = functional.pad(queries, (0, 0, earlier, 0))
    gates = Gates(mini_batch_size, by_head.decay, by_head.momentum, token_scale)
    known, dependent = linear_writes(learner, by_head) if learner.model == "linear" else ([], [])
    longest = 1 if gates.by_channel else CHUNK_SIZE
    bound = bool(dependent) or token_scale is not None
    if learner.model == "linear" and (not bound or mini_batch_size <= longest):
        layer = Layer(queries, _when(learner), known, dependent, gates)
        out, end = _token_steps(layer, carried)
    else:
        out, end = _token_steps_one_by_one(learner, queries, by_head, gates, carried)
    return out[:, :, earlier:].transpose(1, 2), end


def _token_steps(layer: Layer, carried: Carried) -> tuple[torch.Tensor, Carried]:
    """``step="token"`` of the linear model, in one go."""
    num_tokens, size = layer.q.shape[2], layer.gates.mini_batch_size
    closed = num_tokens // size * size
    speed = carried.momentum[0] if carried.momentum else None
    out, weight, speed = scan(layer.part(0, closed), carried.weights[0], speed)
    end = Carried((weight,), () if speed is None else (speed,))
    if closed < num_tokens:
        tail, _, _ = scan(layer.part(closed, num_tokens), weight, speed)
        out = torch.cat([out, tail], dim=2)
    return out, end


def _token_steps_one_by_one(
    learner: InnerLearner, q: torch.Tensor, tokens: Tokens, gates: Gates, carried: Carried
) -> tuple[torch.Tensor, Carried]:
    """``step="token"``, one mini-batch after the other."""
    size, when = gates.mini_batch_size, _when(learner)
    weights, momentum = carried.weights, carried.momentum
    outputs = []
    for part_q, part in _mini_batches(q, tokens, size):
        here = Gates(size, part.decay, part.momentum, gates.token_scale)
        speeds = momentum or (None,) * len(weights)
        matrices = list(zip(writes(learner, weights, part), weights, speeds, strict=True))
        if learner.model == "linear":
            afters = [_read(Layer(part_q, when, matrices[0][0], [], here), *matrices[0][1:])]
            outputs.append(afters[0][0])
        else:
            gate, linear = (
                _read(Layer(part_q, when, written, [], here), weight, speed)
                for written, weight, speed in (matrices[0], matrices[2])
            )
            written, weight, speed = matrices[1]
            hidden = functional.silu(gate[0]) * linear[0]
            output = _read(Layer(hidden, when, written, [], here), weight, speed)
            afters = [gate, output, linear]
            outputs.append(output[0])
        if part_q.shape[2] == size:
            weights = tuple(weight for _, weight, _ in afters)
            momentum = tuple(speed for _, _, speed in afters if speed is not None)
    return torch.cat(outputs, dim=2), Carried(weights, momentum)


def _read(layer: Layer, weight: torch.Tensor, speed: torch.Tensor | None) -> After:
    """A scan of known writes over one mini-batch."""
    scale = layer.gates.token_scale
    if scale is None:
        return scan(layer, weight, speed)
    # The scale multiplies all that the mini-batch has learned so far.
    plain = Gates(layer.gates.mini_batch_size)
    bare = Layer(layer.q, layer.when, layer.known, [], plain)
    learned, total, _ = scan(bare, torch.zeros_like(weight), None)
    here = scale[: layer.q.shape[2]]
    if layer.when == "before":
        here = functional.pad(here[:-1], (1, 0))
    return layer.q @ weight + here[:, None] * learned, weight + scale[-1] * total, None


def _mini_batch_steps(
    learner: InnerLearner, q: torch.Tensor, tokens: Tokens, carried: Carried, size: int
) -> tuple[torch.Tensor, Carried]:
    """``step="mini-batch"``; q may lack the first tokens'."""
    weights, momentum = carried.weights, carried.momentum
    num_tokens = tokens.k.shape[2]
    parts = torch.split(q, _parts(num_tokens, size, num_tokens - q.shape[2]), dim=2)
    outputs = []
    for part_q, (_, part) in zip(parts, _mini_batches(tokens.k, tokens, size), strict=True):
        start = weights
        if part.k.shape[2] == size or not learner.causal:
            weights, momentum = _step(learner, weights, momentum, carried.norms, part)
        read = weights if learner.order == "update-then-apply" else start
        outputs.append(apply(learner, read, part_q))
    return torch.cat(outputs, dim=2), Carried(weights, momentum, carried.norms)


def _step(
    learner: InnerLearner, weights: Tensors, momentum: Tensors, norms: Tensors, tokens: Tokens
) -> tuple[Tensors, Tensors]:
    """One step on all of a mini-batch's tokens."""
    steps = []
    for pairs in writes(learner, weights, tokens):
        sums = [a.transpose(-1, -2) @ u for a, u in pairs]
        steps.append(sum(sums[1:], sums[0]))
    if tokens.momentum is not None:
        theta = tokens.momentum.mean(-1)[..., None, None]
        steps = [theta * speed + step for speed, step in zip(momentum, steps, strict=True)]
        momentum = tuple(steps)
    if learner.muon:
        steps = [orthogonalize(step) for step in steps]
    if tokens.decay is not None:
        kept = tokens.decay.prod(2)[..., None]
        kept = kept[..., None] if tokens.decay.ndim == 3 else kept
        weights = tuple(kept * weight for weight in weights)
    weights = tuple(map(torch.add, weights, steps))
    if learner.normalize:
        weights = tuple(map(with_norms, weights, norms))
    return weights, momentum


def _mini_batches(q: torch.Tensor, tokens: Tokens, size: int) -> list[tuple[torch.Tensor, Tokens]]:
    """``[B, H, T, ...]`` by mini-batch; the last may be shorter."""
    split = {name: torch.split(tensor, size, dim=2) for name, tensor in tokens.named().items()}
    return [
        (part_q, Tokens(**{name: parts[i] for name, parts in split.items()}))
        for i, part_q in enumerate(torch.split(q, size, dim=2))
    ]


def _parts(num_tokens: int, size: int, earlier: int) -> list[int]:
    """How many of each mini-batch's tokens have queries, when the first ``earlier`` have none."""
    lengths = [min(size, num_tokens - first) for first in range(0, num_tokens, size)]
    return [lengths[0] - earlier, *lengths[1:]]


def _when(learner: InnerLearner) -> When:
    return "after" if learner.order == "update-then-apply" else "before"
