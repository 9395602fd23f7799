"""Backward through the dual form, by hand: group by group from the last, each computed again.

Shape legend: B rows, T tokens, H heads, N = B·H programs, M mini-batches, m mini-batches of a group,
b tokens in a mini-batch, D head width, E = D + 1. ``d_x`` is the loss's gradient with respect to x.
"""

import torch

from ttt_adapt.kernels.inner_loop.checkpointing import Grouping
from ttt_adapt.kernels.inner_loop.models import EPSILON, Tensors, Tokens
from ttt_adapt.kernels.ttt_linear.chunked_group import Group


class Backward:
    """Gradients of everything that went in; equation numbers are those of README.md."""

    def __init__(
        self,
        grouping: Grouping,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lr: torch.Tensor,
        visible: torch.Tensor,
        fold: torch.Tensor,
        ln_weight: torch.Tensor,
        ln_bias: torch.Tensor,
    ) -> None:
        self.grouping, self.tokens = grouping, Tokens(q, k, v, lr)
        self.visible, self.fold = visible, fold
        self.group = group = Group(grouping, ln_weight, ln_bias)
        m, n, b, width = grouping.group, grouping.num_programs, grouping.size, group.width

        def empty(*shape: int) -> torch.Tensor:
            return ln_weight.new_empty(m, n, *shape)

        self.kept = ln_weight.new_empty(m + 1, n, width + 1, width)
        self.d_out, self.d_gradients, self.d_u, self.through_scores, self.other = (
            empty(b, width) for _ in range(5)
        )
        self.d_z, self.d_keys_queries = empty(2 * b, width), empty(2 * b, width)
        self.d_fold_keys, self.d_scores = empty(b, width + 1), empty(b, b)
        # What the loops touch, cut into mini-batches once.
        self.kept_steps = self.kept.unbind()
        self.loop_scratch = ln_weight.new_empty(2, n, b, width).unbind()
        self.steps = list(
            zip(
                group.fold_keys,
                group.keys_queries.mT,
                group.normal,
                group.mean,
                group.rstd,
                group.gradients,
                self.through_scores,
                self.d_gradients,
                self.d_u,
                self.d_z,
                self.d_z[:, :, :b],
                self.d_fold_keys,
                strict=True,
            )
        )
        self.d_tokens = self.tokens.map(
            lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        )
        self.d_visible, self.d_fold = torch.zeros_like(visible), torch.zeros_like(fold)
        self.d_ln_weight = torch.zeros_like(group.ln_weight)
        self.d_ln_bias = torch.zeros_like(group.ln_bias)

    def run(
        self,
        checkpoints: torch.Tensor,
        d_out: torch.Tensor,
        d_weight: torch.Tensor,
        d_bias: torch.Tensor,
    ) -> Tensors:
        """Gradients for q, k, v, lr, visible, fold, ln_weight, ln_bias, weight and bias.

        Args:
            checkpoints: ``[groups, N, E, D]``.
            d_out: ``[B, T, H, D]``; d_weight: ``[B, H, D, D]``; d_bias: ``[B, H, D]``.
        """
        d_weights = torch.cat((d_weight, d_bias[:, :, None]), dim=2).flatten(0, 1)
        for index, (first, last) in reversed(list(enumerate(self.grouping.spans()))):
            self._run_group(checkpoints[index], d_out, d_weights, first, last)
        d_weights, d_ln_weight, d_ln_bias = (
            tensor.view(self.grouping.batch, self.grouping.heads, -1, self.group.width)
            for tensor in (d_weights, self.d_ln_weight, self.d_ln_bias)
        )
        return (
            *self.d_tokens,
            self.d_visible,
            self.d_fold,
            d_ln_weight[:, :, 0].sum(0),
            d_ln_bias[:, :, 0].sum(0),
            d_weights[:, :, :-1],
            d_weights[:, :, -1],
        )

    def _run_group(
        self,
        checkpoint: torch.Tensor,
        d_out_BTHD: torch.Tensor,
        d_weights: torch.Tensor,
        first: int,
        last: int,
    ) -> None:
        """One group; ``d_weights [N, E, D]`` is changed from its end's gradient to its beginning's."""
        visible = self.visible if self.visible.shape[0] == 1 else self.visible[first:last]
        self.group.load(self.tokens, self.fold, first, last)
        self.kept[0] = checkpoint
        self.group.learn(self.kept_steps[0], self.kept_steps)
        self.group.answer(visible)
        self.grouping.load(d_out_BTHD, first, last, self.d_out[: last - first])
        self._through_answers(visible, first, last)
        self._through_learning(d_weights)
        self._to_tokens(first, last)

    def _through_answers(self, visible: torch.Tensor, first: int, last: int) -> None:
        """From outputs to z of the queries, the scores, and the scores' share of the gradients."""
        group, size = self.group, self.grouping.size
        n, inverse = group.count, 1.0 / group.width
        d_out, answers, scratch = self.d_out[:n], group.answers[:n], group.scratch[:n]
        ones = group.unit_rstd.expand(n, -1, -1, -1)
        self.d_ln_weight += over_tokens(ones, torch.mul(d_out, answers, out=scratch))
        self.d_ln_bias += over_tokens(ones, d_out)
        # (B1)
        u, d_z = self.other[:n], self.d_z[:n, :, size:]
        torch.mul(d_out, group.ln_weight, out=u)
        along = torch.mul(u, answers, out=scratch).sum(-1, keepdim=True)
        u.sub_(u.sum(-1, keepdim=True), alpha=inverse)
        u.addcmul_(answers, along, value=-inverse)
        torch.mul(u, group.answers_rstd[:n], out=d_z)
        # (B2)
        d_scores, flat_d_z = self.d_scores[:n], d_z.flatten(0, 1)
        torch.bmm(flat_d_z, group.gradients[:n].flatten(0, 1).mT, out=d_scores.flatten(0, 1)).neg_()
        d_visible = (d_scores * group.scores[:n]).sum_to_size(visible.shape)
        if self.visible.shape[0] == 1:
            self.d_visible += d_visible
        else:
            self.d_visible[first:last] = d_visible
        d_scores.mul_(visible)
        # (B3), its sign is taken in the loop
        torch.bmm(
            group.visible_scores[:n].flatten(0, 1).mT,
            flat_d_z,
            out=self.through_scores[:n].flatten(0, 1),
        )

    def _through_learning(self, d_weights: torch.Tensor) -> None:
        """The serial part, backwards: from the weights after each mini-batch to those before."""
        group = self.group
        n, inverse = group.count, 1.0 / group.width
        # slope − mean(u x̂), in place: the loop needs no more of the slope. (B6)
        u, normal, rstd = self.other[:n], group.normal[:n], group.rstd[:n]
        torch.addcmul(group.offset[:n], normal, group.slope[:n], out=u)
        u_along_normal = u.mul_(normal).sum(-1, keepdim=True)
        curvature = group.slope[:n].sub_(u_along_normal, alpha=inverse)
        leak = (2.0 * EPSILON * inverse) * u_along_normal * rstd.pow(3)
        d_weights_t, (product, y) = d_weights.mT, self.loop_scratch
        for step, bend, slip in zip(
            self.steps[:n][::-1], curvature.unbind()[::-1], leak.unbind()[::-1], strict=True
        ):
            fold_keys, tokens, normal, mean, rstd, g, base, d_g, d_u, d_z, d_z_keys, d_fold = step
            torch.bmm(g, d_weights_t, out=d_fold)
            torch.baddbmm(base, fold_keys, d_weights, beta=-1.0, out=d_g)  # (B4)
            torch.mul(group.tangent(d_g, normal, mean), rstd, out=d_u)  # (B5)
            along_normal = torch.mul(d_g, normal, out=product).sum(-1, keepdim=True)
            along_g = torch.mul(d_g, g, out=product).sum(-1, keepdim=True)
            along_g.addcmul_(along_normal, slip)
            torch.mul(d_u, bend, out=y).addcmul_(g, along_normal, value=-inverse)
            d_normal = group.tangent(y, normal, mean).addcmul_(normal, along_g, value=-inverse)
            torch.mul(d_normal, rstd, out=d_z_keys)  # (B6)
            d_weights.baddbmm_(tokens, d_z)  # (B7)

    def _to_tokens(self, first: int, last: int) -> None:
        """From z, scores, u and the folding keys to q, k, v, the learning rates and scales."""
        group, size, width = self.group, self.grouping.size, self.group.width
        n, store = group.count, self.grouping.store
        keys, queries = group.keys_queries[:n, :, :size], group.keys_queries[:n, :, size:]
        d_scores = self.d_scores[:n].flatten(0, 1)
        weights = self.kept[:n, :, :width].flatten(0, 1)
        # (B8); q's gradient begins with the residual's.
        through_z, d_q = self.d_keys_queries[:n], self.d_out[:n]
        torch.bmm(self.d_z[:n].flatten(0, 1), weights.mT, out=through_z.flatten(0, 1))
        d_q.add_(through_z[:, :, size:])
        d_q.flatten(0, 1).baddbmm_(d_scores, keys[..., :width].flatten(0, 1))
        store(d_q, first, last, self.d_tokens.q)
        d_k = self.d_gradients[:n]
        torch.bmm(d_scores.mT, queries[..., :width].flatten(0, 1), out=d_k.flatten(0, 1))
        d_k.add_(through_z[:, :, :size])
        d_fold_keys, fold = self.d_fold_keys[:n], self.fold[first:last]
        d_k.addcmul_(d_fold_keys[..., :width], fold, value=-1.0)
        along = d_fold_keys.mul_(keys).sum((2, 3), keepdim=True)
        torch.neg(along, out=self.d_fold[first:last])
        # (B9)
        d_u, normal, error, lr = self.d_u[:n], group.normal[:n], group.error[:n], group.lr[:n]
        gamma, beta, product = group.ln_weight, group.ln_bias, self.other[:n]
        torch.addcmul(error, normal, gamma, out=product).mul_(d_u)
        d_lr = torch.mul(product, gamma, out=group.scratch[:n])
        d_lr = d_lr.addcmul_(d_u, gamma * beta).sum(-1, keepdim=True)
        store(d_lr, first, last, self.d_tokens.lr[..., None])
        weighted = over_tokens(lr, d_u)
        self.d_ln_bias += gamma * weighted
        self.d_ln_weight += beta * weighted + over_tokens(lr, product)
        self.d_ln_weight += gamma * over_tokens(lr, torch.mul(d_u, normal, out=product))
        d_v = d_u.mul_(-gamma).mul_(lr)
        store(d_v, first, last, self.d_tokens.v)
        store(d_k.sub_(d_v), first, last, self.d_tokens.k)


def over_tokens(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``Σ weights · values`` over mini-batches and tokens: ``[m, N, b, 1]``, ``[m, N, b, D]`` to ``[N, 1, D]``."""
    return (weights.mT @ values).sum(0)
