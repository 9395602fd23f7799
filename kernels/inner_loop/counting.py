"""The operators' cost by formula, known to torch's FLOP counter whatever the backend.

A counter sees products of matrices one by one: those of the chunked form with its padding, none of
Triton's. While one is counting, a core therefore runs as one operation, ``ttt_adapt::inner_loop``,
which the counter knows by formula (``counted_core.py``); at any other time nothing changes.

Shape legend: B rows, T tokens, H heads, D head width, F hidden width, b tokens in a mini-batch.
"""

from importlib import import_module

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ttt_adapt.kernels.inner_loop.operator import Core

CORES = {"reference": "reference", "chunked": "chunked", "triton": "autograd"}
"""The module that has a backend's core."""


def core_of(name: str, backend: str) -> Core:
    """A backend's core; imported when used: the kernels import Triton, the reference is for tests."""
    core: Core = import_module(f"ttt_adapt.kernels.{name}.{CORES[backend]}").core
    return core


def inner_loop_macs(
    num_tokens: int, num_heads: int, width: int, mini_batch_size: int, hidden: int = 0
) -> int:
    """Multiply-adds of TTT-Linear's (of TTT-MLP's, with a hidden width) dual form for one row.

    ``H (3 T D² + 2 D Σ b²)``, the sum over mini-batches, of which the last may be shorter; for the
    perceptron ``H (7 T D F + 2 (D + F) Σ b²)``. Masks are not taken advantage of.
    """
    whole, rest = divmod(num_tokens, mini_batch_size)
    squares = whole * mini_batch_size**2 + rest**2
    if hidden:
        per_head = 7 * num_tokens * width * hidden + 2 * (width + hidden) * squares
    else:
        per_head = 3 * num_tokens * width**2 + 2 * width * squares
    return num_heads * per_head


def counted(core: Core, name: str, backend: str) -> Core:
    """The core itself, or as one operation while a counter is counting.

    The reference stays as it is: it differentiates inside, which no operation may.
    """
    counters = [
        mode
        for mode in _get_current_dispatch_mode_stack()
        if type(mode).__name__ == "_FlopCounterMode"
    ]
    if backend == "reference" or not counters:
        return core
    # Imported when used: torch's counter imports Triton.
    from ttt_adapt.kernels.inner_loop.counted_core import FORMULAS, as_operation

    for mode in counters:
        # This counter may have been made before the formulas were registered.
        known = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if known is not None:
            known.update(FORMULAS)
    return as_operation(name, backend)
