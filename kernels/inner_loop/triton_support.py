"""What the Triton kernels of all inner models share: launching, products, layer norm and its gradients.

The device functions work on float32 blocks of either orientation: ``AXIS`` is the one of the head
width, and what belongs to a column of it (``weight``, ``bias``) comes shaped to broadcast. Blocks are
never padded along it: head widths are powers of two. They hold no state and load nothing.

Kernels annotate with ``tl.tensor`` and ``tl.constexpr`` alone: a compiled one, unlike an interpreted
one, reads its annotations and knows no other names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ttt_adapt.errors import OperatorInputError
from ttt_adapt.kernels.inner_loop.models import EPSILON

EPS = tl.constexpr(EPSILON)


class Launch(NamedTuple):
    """How a kernel is launched; the interpreter takes no notice of it.

    ``max_registers`` of a thread: fewer let more programs share a multiprocessor, and spill; 0 sets
    no limit. NVIDIA only.
    """

    num_warps: int
    num_stages: int = 1
    max_registers: int = 0

    def options(self) -> dict[str, int]:
        """As keywords of a launch."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers and torch.version.hip is None:
            found["maxnreg"] = self.max_registers
        return found


def interpreting() -> bool:
    """Whether kernels run under ``TRITON_INTERPRET=1``, which knows neither bf16 nor autotuning."""
    return bool(triton.knobs.runtime.interpret)


def block_of(size: int) -> int:
    """The power of two, at least 16, that ``tl.dot`` accepts for ``size`` rows."""
    return max(16, 1 << (size - 1).bit_length())


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel stores for results of ``dtype``, to be cast by torch.

    The interpreter cuts off what float32 has more than bfloat16, where a GPU rounds.
    """
    return torch.float32 if dtype == torch.bfloat16 and interpreting() else dtype


def dense_from(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The tensor, copied unless it is contiguous from this axis on; axes before it may have any stride."""
    expected = 1
    for size, stride in zip(
        reversed(tensor.shape[axis:]), reversed(tensor.stride()[axis:]), strict=True
    ):
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def product_mode(device: torch.device) -> str:
    """How :func:`matmul` multiplies: ``split``, or ``ieee`` in the interpreter and without bfloat16."""
    if interpreting():
        return "ieee"
    old = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8
    return "ieee" if old else "split"


@contextmanager
def fitting(name: str, q: torch.Tensor, mini_batch_size: int) -> Iterator[None]:
    """Launches on q's device, and says in the operator's terms when a program does not fit it.

    Raises:
        OperatorInputError: too little shared memory for these sizes.
    """
    try:
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            yield
    except triton.runtime.errors.OutOfResources as error:
        raise OperatorInputError(
            f"{name}: backend 'triton' needs {error.required} bytes of {error.name} for a head width "
            f"of {q.shape[-1]} and mini-batches of {mini_batch_size} in {q.dtype}, this GPU has "
            f"{error.limit}; use bfloat16, smaller mini-batches or backend='chunked'"
        ) from error


@triton.jit
def _part(x: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    # The PART-th bfloat16 of a float32, its upper half: three of them have all 24 bits between them.
    for _ in tl.static_range(PART):
        x = x - (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def matmul_add(c: tl.tensor, a: tl.tensor, b: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """``c + a @ b`` for a float32 ``c``; see :func:`matmul`."""
    if MODE == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc=c)
    elif MODE == "split":
        # Small parts first: their sum is not lost in the large one.
        if a.dtype != tl.float32 and b.dtype != tl.float32:
            return tl.dot(a, b, acc=c)
        elif a.dtype == tl.bfloat16:
            c = tl.dot(a, _part(b, 2), acc=c)
            c = tl.dot(a, _part(b, 1), acc=c)
            return tl.dot(a, _part(b, 0), acc=c)
        elif b.dtype == tl.bfloat16:
            c = tl.dot(_part(a, 2), b, acc=c)
            c = tl.dot(_part(a, 1), b, acc=c)
            return tl.dot(_part(a, 0), b, acc=c)
        else:
            a, b = a.to(tl.float32), b.to(tl.float32)
            c = tl.dot(_part(a, 1), _part(b, 1), acc=c)
            c = tl.dot(_part(a, 2), _part(b, 0), acc=c)
            c = tl.dot(_part(a, 0), _part(b, 2), acc=c)
            c = tl.dot(_part(a, 1), _part(b, 0), acc=c)
            c = tl.dot(_part(a, 0), _part(b, 1), acc=c)
            return tl.dot(_part(a, 0), _part(b, 0), acc=c)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=c, input_precision=MODE)


@triton.jit
def matmul(a: tl.tensor, b: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """``a @ b`` in float32; operands float32, or of the tokens' dtype.

    ``MODE``: ``split`` gives float32's accuracy on tensor cores that know 16 bits, by adding the
    products of bfloat16 parts that a float32 result can show: three where one operand is bfloat16,
    six where none is; two operands of the tokens' dtype are multiplied as they are. ``ieee`` (no
    tensor cores), ``tf32`` and ``tf32x3`` are ``tl.dot``'s own, on float32. ``bf16`` rounds both
    operands to bfloat16, and with them the state: fastest, and never the default.
    """
    return matmul_add(tl.zeros([a.shape[0], b.shape[1]], tl.float32), a, b, MODE)


@triton.jit
def normalize(z: tl.tensor, WIDTH: tl.constexpr, AXIS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """``(z − mean) · rstd`` and ``rstd`` (kept dimension) of float32 ``z``."""
    centred = z - tl.sum(z, axis=AXIS, keep_dims=True) / WIDTH
    variance = tl.sum(centred * centred, axis=AXIS, keep_dims=True) / WIDTH
    rstd = 1.0 / tl.sqrt(variance + EPS)
    return centred * rstd, rstd


@triton.jit
def normalize_backward(
    d_normal: tl.tensor, normal: tl.tensor, rstd: tl.tensor, WIDTH: tl.constexpr, AXIS: tl.constexpr
) -> tl.tensor:
    """∂/∂z for a gradient ``d_normal`` of :func:`normalize`'s first result."""
    mean = tl.sum(d_normal, axis=AXIS, keep_dims=True) / WIDTH
    along = tl.sum(d_normal * normal, axis=AXIS, keep_dims=True) / WIDTH
    return (d_normal - mean - normal * along) * rstd


@triton.jit
def norm_l2_gradient(
    z: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    WIDTH: tl.constexpr,
    AXIS: tl.constexpr,
) -> tl.tensor:
    """∂/∂z of ``½‖LN(z) − target‖²``, fused with the layer norm.

    Returns:
        the gradient e, and for :func:`norm_l2_gradient_backward` ``normal`` and ``rstd``.
    """
    normal, rstd = normalize(z, WIDTH, AXIS)
    upstream = (normal * weight + bias - target) * weight
    gradient = normalize_backward(upstream, normal, rstd, WIDTH, AXIS)
    return gradient, normal, rstd


@triton.jit
def norm_l2_gradient_backward(
    d_gradient: tl.tensor,
    gradient: tl.tensor,
    normal: tl.tensor,
    rstd: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    WIDTH: tl.constexpr,
    AXIS: tl.constexpr,
) -> tl.tensor:
    """The second derivative: what a gradient ``w = d_gradient`` of e means for e's inputs.

    With h the normalized z, r its rstd, u = (h γ + β − t) γ and m = mean(u h):
    ``e = r (u − mean(u) − h m)``. For c = r w and p = mean(c h):

    - ``du = c − mean(c) − h p``; ``dt = −γ du``; ``dβ = γ du``; ``dγ = (2 h γ + β − t) du``
    - ``dh = γ² du − m c − p u``, where m and p are functions of h, too
    - ``dz = r (dh − mean(dh) − h (mean(dh h) + mean(w e)))``, the last term through r itself

    Returns:
        ``dz``, ``d_target``, and the summands of ``d_weight`` and ``d_bias``, one for each token.
    """
    error = normal * weight + bias - target
    upstream = error * weight
    m = tl.sum(upstream * normal, axis=AXIS, keep_dims=True) / WIDTH
    scaled = d_gradient * rstd
    p = tl.sum(scaled * normal, axis=AXIS, keep_dims=True) / WIDTH
    d_upstream = scaled - tl.sum(scaled, axis=AXIS, keep_dims=True) / WIDTH - normal * p
    d_bias = d_upstream * weight
    d_weight = d_upstream * (error + normal * weight)
    d_normal = d_bias * weight - m * scaled - p * upstream
    mean = tl.sum(d_normal, axis=AXIS, keep_dims=True) / WIDTH
    along = tl.sum(d_normal * normal + d_gradient * gradient, axis=AXIS, keep_dims=True) / WIDTH
    dz = (d_normal - mean - normal * along) * rstd
    return dz, -d_bias, d_weight, d_bias
