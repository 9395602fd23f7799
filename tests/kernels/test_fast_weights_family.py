"""Each member of the family against its paper's own recurrence, written out here, in float64.

Papers' states have ``v = S k``; a state here is its transpose, ``v = k W``.
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from ttt_adapt.kernels.fast_weights import InnerLearner, family, fast_weights
from ttt_adapt.kernels.fast_weights.steps import orthogonalize

B, T, H, D, F = 2, 37, 2, 6, 9
both_backends = pytest.mark.parametrize("backend", ["reference", "chunked"])

Step = Callable[[torch.Tensor, int], torch.Tensor]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def q_k_v() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k = functional.normalize(normal(B, T, H, D, seed=2), dim=-1)
    return normal(B, T, H, D, seed=1), k, normal(B, T, H, D, seed=3)


def gate(seed: int, *more: int) -> torch.Tensor:
    return normal(B, T, H, *more, seed=seed).sigmoid()


def recur(q: torch.Tensor, step: Step) -> torch.Tensor:
    """``o_t = S_t q_t`` with ``S_t = step(S_(t−1), t)``, from zero; S ``[B, H, D, D]``."""
    state, outputs = q.new_zeros(B, H, D, D), []
    for t in range(T):
        state = step(state, t)
        outputs.append(torch.einsum("bhij,bhj->bhi", state, q[:, t]))
    return torch.stack(outputs, dim=1)


def outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left[..., :, None] * right[..., None, :]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@both_backends
@pytest.mark.parametrize("loss", ["l2", "dot"])
def test_one_mini_batch_from_zero_is_linear_attention(backend: str, loss: str) -> None:
    """Theorem 1 of the TTT paper: ``ℓ = ‖f(k) − v‖²`` with η = ½ is our ``½‖f(k) − v‖²`` with 1."""
    q, k, v = q_k_v()
    causal = torch.ones(T, T, dtype=torch.bool).tril()[:, :, None, None]
    scores = torch.einsum("bthd,bshd->tsbh", q, k) * causal
    expected = torch.einsum("tsbh,bshd->bthd", scores, v)
    eta = torch.full((B, T, H), 0.5, dtype=torch.float64)
    learner = InnerLearner(loss=loss)  # type: ignore[arg-type]
    out, _ = fast_weights(q, k, v, lr=2 * eta, learner=learner, mini_batch_size=T, backend=backend)
    assert_same(out, expected)
    assert_same(family.linear_attention(q, k, v, backend=backend)[0], expected)


@both_backends
def test_one_token_at_a_time_is_the_delta_rule(backend: str) -> None:
    q, k, v = q_k_v()
    beta = gate(4)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        held = torch.einsum("bhij,bhj->bhi", state, k[:, t])
        return state + outer(beta[:, t, :, None] * (v[:, t] - held), k[:, t])

    assert_same(family.delta_rule(q, k, v, beta=beta, backend=backend)[0], recur(q, step))


@both_backends
def test_gated_delta_rule(backend: str) -> None:
    q, k, v = q_k_v()
    alpha, beta, eye = gate(4), gate(5), torch.eye(D, dtype=torch.float64)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        a, b = alpha[:, t, :, None, None], beta[:, t, :, None, None]
        return state @ (a * (eye - b * outer(k[:, t], k[:, t]))) + b * outer(v[:, t], k[:, t])

    found = family.gated_delta_rule(q, k, v, alpha=alpha, beta=beta, backend=backend)[0]
    assert_same(found, recur(q, step))


@both_backends
@pytest.mark.parametrize("channels", [(), (D,)])
def test_forgetting_alone_is_gated_linear_attention(backend: str, channels: tuple[int]) -> None:
    q, k, v = q_k_v()
    decay = gate(4, *channels)
    per_key = decay if channels else decay[..., None].expand_as(k)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        return state * per_key[:, t, :, None, :] + outer(v[:, t], k[:, t])

    found = family.gated_linear_attention(q, k, v, decay=decay, backend=backend)[0]
    assert_same(found, recur(q, step))


@both_backends
def test_rwkv7(backend: str) -> None:
    r, k, v = q_k_v()
    w, a = gate(4, D), gate(5, D)
    kappa = functional.normalize(normal(B, T, H, D, seed=6), dim=-1)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        change = torch.diag_embed(w[:, t]) - outer(kappa[:, t], a[:, t] * kappa[:, t])
        return state @ change + outer(v[:, t], k[:, t])

    assert_same(family.rwkv7(r, w, k, v, kappa=kappa, a=a, backend=backend)[0], recur(r, step))


@both_backends
@pytest.mark.parametrize("size", [1, 4, 16, 50])
def test_titans(backend: str, size: int) -> None:
    """``M_t = (1 − α) M + S_t``, ``S_t = η S − θ ∇ℓ``, the gradient at the mini-batch's start."""
    q, k, v = q_k_v()
    theta, eta, alpha = 0.3 * gate(4), gate(5), 0.2 * gate(6)
    momentum, start = torch.zeros(B, H, D, D, dtype=torch.float64), torch.tensor(0.0)

    def step(memory: torch.Tensor, t: int) -> torch.Tensor:
        nonlocal momentum, start
        start = memory if t % size == 0 else start
        error = torch.einsum("bhij,bhj->bhi", start, k[:, t]) - v[:, t]
        surprise = 2 * outer(error, k[:, t])
        momentum = eta[:, t, :, None, None] * momentum - theta[:, t, :, None, None] * surprise
        return (1 - alpha[:, t, :, None, None]) * memory + momentum

    found, _ = family.titans(
        q, k, v, theta=theta, eta=eta, alpha=alpha, mini_batch_size=size, backend=backend
    )
    assert_same(found, recur(q, step))


@both_backends
@pytest.mark.parametrize("size", [1, 5, 16, 40])
def test_ttt_without_norm(backend: str, size: int) -> None:
    """``W_i = W − s_i Σ_(j≤i) lr_j ∇ℓ_j(W)``: TTT without bias, layer norm and residual."""
    q, k, v = q_k_v()
    lr, scale = gate(4), normal(size, seed=5).abs()
    weight = 0.3 * normal(H, D, D, seed=6)
    start, expected = weight.expand(B, H, D, D), torch.zeros_like(q)
    for first in range(0, T, size):
        total = torch.zeros_like(start)
        for i, t in enumerate(range(first, min(first + size, T))):
            error = torch.einsum("bhi,bhij->bhj", k[:, t], start) - v[:, t]
            total = total + lr[:, t, :, None, None] * outer(k[:, t], error)
            now = start - scale[i] * total
            expected[:, t] = torch.einsum("bhi,bhij->bhj", q[:, t], now)
        start = now
    found, _ = family.ttt_without_norm(
        q, k, v, lr=lr, token_scale=scale, weights=weight, backend=backend
    )
    assert_same(found, expected)


def swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    """``[B, H, n, D]``."""
    return (functional.silu(x @ w1) * (x @ w3)) @ w2


def initial_swiglu() -> tuple[torch.Tensor, ...]:
    shapes = [(H, D, F), (H, F, D), (H, D, F)]
    return tuple(0.4 * normal(*shape, seed=10 + i) for i, shape in enumerate(shapes))


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """The same polynomials, on singular values."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (s.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for a, b, c in [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ]:
        s = a * s + b * s**3 + c * s**5
    found: torch.Tensor = (u * s[..., None, :]) @ vh
    return found


@both_backends
@pytest.mark.parametrize("order", ["update-then-apply", "apply-then-update"])
@pytest.mark.parametrize("muon", [False, True])
def test_lact(backend: str, order: str, muon: bool) -> None:
    q, k, v = q_k_v()
    lr, momentum, chunk = 0.2 * gate(4, 3), gate(5), 12
    weights = initial_swiglu()
    now = [weight.expand(B, *weight.shape) for weight in weights]
    norms = [weight.norm(dim=-2, keepdim=True) for weight in now]
    speed = [torch.zeros_like(weight) for weight in now]
    outputs = []
    for first in range(0, T, chunk):
        here = slice(first, first + chunk)
        part_q, part_k, part_v = (x[:, here].transpose(1, 2) for x in (q, k, v))
        before = now
        leaves = [weight.detach().requires_grad_() for weight in now]
        agreement = (swiglu(part_k, *leaves) * part_v).sum(-1)
        for m, leaf in enumerate(leaves):
            loss = -(agreement * lr[:, here, :, m].transpose(1, 2)).sum()
            (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            speed[m] = momentum[:, here].mean(1)[..., None, None] * speed[m] + gradient
        steps = [newton_schulz(s) for s in speed] if muon else speed
        moved = [weight - step for weight, step in zip(now, steps, strict=True)]
        now = [
            w * n / (w.norm(dim=-2, keepdim=True) + 1e-5) for w, n in zip(moved, norms, strict=True)
        ]
        read = now if order == "update-then-apply" else before
        outputs.append(swiglu(part_q, *read).transpose(1, 2))
    found, state = family.lact(
        q,
        k,
        v,
        lr=lr,
        weights=weights,
        chunk_size=chunk,
        momentum=momentum,
        muon=muon,
        order=order,  # type: ignore[arg-type]
        output_final_state=True,
        backend=backend,
    )
    torch.testing.assert_close(found, torch.cat(outputs, 1), rtol=1e-8, atol=1e-9)
    assert state is not None
    for weight, norm in zip(state.weights, norms, strict=True):
        torch.testing.assert_close(weight.norm(dim=-2, keepdim=True), norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_muon_s_step_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    matrix = normal(3, *shape)
    found = orthogonalize(matrix)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    core = u.transpose(-1, -2) @ found @ vh.transpose(-1, -2)
    values = torch.diagonal(core, dim1=-2, dim2=-1)
    assert bool((values > 0.85).all()) and bool((values < 1.15).all())
    torch.testing.assert_close(core, torch.diag_embed(values), rtol=0, atol=1e-10)
    assert bool((orthogonalize(torch.zeros(2, *shape)) == 0).all())


@both_backends
def test_the_step_does_not_matter_for_single_tokens(backend: str) -> None:
    """With mini-batches of one, a step after each token is a step after each mini-batch."""
    q, k, v = q_k_v()
    lr, decay, momentum = gate(4), gate(5), gate(6)
    by_token, by_batch = (
        fast_weights(
            q,
            k,
            v,
            lr=lr,
            decay=decay,
            momentum=momentum,
            learner=learner,
            mini_batch_size=1,
            backend=backend,
        )[0]
        for learner in (InnerLearner(), InnerLearner(step="mini-batch"))
    )
    assert_same(by_token, by_batch)
