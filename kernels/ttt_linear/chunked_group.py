"""Forward through one group of mini-batches: only what is serial in the loop, the rest at once.

Weights and bias are one matrix ``W [N, D+1, D]`` and tokens end with a one, so that ``x @ W`` holds
the bias and ``q · k`` the ones that the bias's own update needs. Rows of W begin centred (mean zero
over the outputs), which changes nothing, for every consumer of ``x W`` normalises it; gradients are
centred, so W stays so, and a norm gives layer norm's statistics in a third of the time.

Shape legend: m mini-batches of the group, N = B·H programs, b tokens in a mini-batch, D head width,
E = D + 1.
"""

from collections.abc import Sequence

import torch

from ttt_adapt.kernels.inner_loop.checkpointing import Grouping
from ttt_adapt.kernels.inner_loop.models import EPSILON, Tokens


class Group:
    """One group's tokens, what is learned from them, and memory that every group uses again.

    Attributes:
        keys_queries: ``[m, N, 2b, E]``, keys first, ones last.
        fold_keys: ``[m, N, b, E]``: ``−fold · k``, what makes weights of gradients.
        error: ``[m, N, b, D]``: ``k − v``.
        lr: ``[m, N, b, 1]``.
        slope, offset: ``[m, N, b, D]``; ``u = slope ∘ x̂ + offset`` is the weighted loss's gradient
            with respect to the normalised ``x̂``.
        z: ``[m, N, 2b, D]``: ``x @ W`` under the weights each mini-batch starts with.
        normal, mean, rstd: ``[m, N, b, D]`` and twice ``[m, N, b, 1]``: x̂ of the keys, its mean (zero but
            for rounding), and what z was scaled by.
        gradients: G, ``[m, N, b, D]``, learning rates included.
        scores, visible_scores: ``[m, N, b, b]``: ``q · k + 1``, and times ``visible``.
        answers, answers_rstd: as normal and rstd, of the queries under their own weights.
    """

    def __init__(
        self, grouping: Grouping, ln_weight_HD: torch.Tensor, ln_bias_HD: torch.Tensor
    ) -> None:
        self.grouping = grouping
        m, n, b = grouping.group, grouping.num_programs, grouping.size
        self.width = width = int(ln_weight_HD.shape[-1])
        self.ln_weight = ln_weight_HD.repeat(grouping.batch, 1)[:, None]
        self.ln_bias = ln_bias_HD.repeat(grouping.batch, 1)[:, None]

        def empty(*shape: int) -> torch.Tensor:
            return ln_weight_HD.new_empty(m, n, *shape)

        self.keys_queries = empty(2 * b, width + 1)
        self.keys_queries[..., width] = 1.0
        self.fold_keys = empty(b, width + 1)
        self.error, self.slope, self.offset = (empty(b, width) for _ in range(3))
        self.lr, self.mean, self.rstd, self.answers_rstd = (empty(b, 1) for _ in range(4))
        self.z = empty(2 * b, width)
        self.normal, self.gradients, self.answers, self.scratch = (
            empty(b, width) for _ in range(4)
        )
        self.scores, self.visible_scores = empty(b, b), empty(b, b)
        self.epsilon = ln_weight_HD.new_full((n, b, 1), EPSILON)
        self.u = torch.empty_like(self.normal[0])
        # What the loop touches, cut into mini-batches once: slicing costs as much as small products.
        self.steps = list(
            zip(
                self.keys_queries,
                self.fold_keys.mT,
                self.z,
                self.z[:, :, :b],
                self.slope,
                self.offset,
                self.normal,
                self.mean,
                self.rstd,
                self.gradients,
                strict=True,
            )
        )
        self.unit_rstd = torch.ones_like(self.epsilon)

    def load(self, tokens: Tokens, fold: torch.Tensor, first: int, last: int) -> None:
        """Take in mini-batches ``first`` to ``last``; tokens ``[B, T, H, ...]``, fold ``[M, N, 1, 1]``."""
        self.count, size, width = last - first, self.grouping.size, self.width
        n, load = self.count, self.grouping.load
        keys, queries = self.keys_queries[:n, :, :size], self.keys_queries[:n, :, size:]
        load(tokens.k, first, last, keys[..., :width])
        load(tokens.q, first, last, queries[..., :width])
        load(tokens.lr[..., None], first, last, self.lr[:n])
        torch.mul(keys, -fold[first:last], out=self.fold_keys[:n])
        load(tokens.v, first, last, self.error[:n])
        error, lr = self.error[:n], self.lr[:n]
        torch.sub(keys[..., :width], error, out=error)
        torch.mul(lr, self.ln_weight.square(), out=self.slope[:n])
        shift = self.ln_weight * self.ln_bias
        torch.addcmul(shift, error, self.ln_weight, out=self.offset[:n]).mul_(lr)

    def learn(self, weights: torch.Tensor, kept: Sequence[torch.Tensor] | None = None) -> None:
        """The serial part: gradients of each mini-batch at the weights that the one before left.

        Args:
            weights: ``[N, E, D]``, where the group begins; where it ends afterwards, unless ``kept``.
            kept: ``m + 1`` times ``[N, E, D]``, the weights before each mini-batch and after the last:
                the first is read (``weights`` itself), the others are written.
        """
        u, inverse, epsilon = self.u, 1.0 / self.width, self.epsilon
        steps = self.steps[: self.count]
        after = [weights] * self.count if kept is None else kept[1 : self.count + 1]
        for (x, fold_keys, z, z_keys, slope, offset, normal, mean, rstd, g), end in zip(
            steps, after, strict=True
        ):
            torch.bmm(x, weights, out=z)
            norm = torch.linalg.vector_norm(z_keys, dim=-1, keepdim=True)
            torch.addcmul(epsilon, norm, norm, value=inverse, out=rstd).rsqrt_()
            torch.mul(z_keys, rstd, out=normal)
            torch.mean(normal, dim=-1, keepdim=True, out=mean)
            torch.addcmul(offset, normal, slope, out=u)
            torch.mul(self.tangent(u, normal, mean), rstd, out=g)
            weights = torch.baddbmm(weights, fold_keys, g, out=end)

    def tangent(self, u: torch.Tensor, normal: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """``u − mean(u) − x̂ mean(u x̂)`` of one mini-batch ``[N, b, D]``: layer norm's own backward.

        ``mean`` is that of x̂, a rounding error. Were it not taken off here, gradients would have a
        mean in proportion to it, and it would grow exponentially with the number of mini-batches.
        """
        found: torch.Tensor = torch.ops.aten.native_layer_norm_backward(
            u, normal, (self.width,), mean, self.unit_rstd, None, None, _INPUT_ONLY
        )[0]
        return found

    def answer(self, visible: torch.Tensor) -> None:
        """All queries at once: ``answers = LN(q W − (visible ∘ (q kᵀ + 1)) G)`` before scale and bias.

        ``visible``: ``[1, 1, b, b]`` or ``[m, N, 1, 1]``.
        """
        n, size = self.count, self.grouping.size
        keys, queries = self.keys_queries[:n, :, :size], self.keys_queries[:n, :, size:]
        scores, seen, answers = self.scores[:n], self.visible_scores[:n], self.answers[:n]
        torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out=scores.flatten(0, 1))
        torch.mul(scores, visible, out=seen)
        gradients = self.gradients[:n].flatten(0, 1)
        torch.bmm(seen.flatten(0, 1), gradients, out=answers.flatten(0, 1))
        torch.sub(self.z[:n, :, size:], answers, out=answers)
        norm = torch.linalg.vector_norm(answers, dim=-1, keepdim=True)
        rstd = torch.addcmul(self.epsilon, norm, norm, value=1.0 / self.width)
        torch.rsqrt(rstd, out=self.answers_rstd[:n])
        answers.mul_(self.answers_rstd[:n])

    def output(self, first: int, last: int, into_BTHD: torch.Tensor) -> None:
        """``q + LN(...)``, where it belongs."""
        n, size = self.count, self.grouping.size
        out = torch.addcmul(self.ln_bias, self.answers[:n], self.ln_weight, out=self.scratch[:n])
        out.add_(self.keys_queries[:n, :, size:, : self.width])
        self.grouping.store(out, first, last, into_BTHD)


_INPUT_ONLY = (True, False, False)
