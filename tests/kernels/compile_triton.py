"""Compile an operator's Triton kernels for a GPU that need not be there.

    python tests/kernels/compile_triton.py ttt_linear bfloat16 90      capability 9.0

Everything runs as it would there, up to the launch: the interpreter accepts what compilers do not.
Prints a JSON object: for each kernel its shared memory in bytes.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ttt_adapt.kernels.inner_loop import FastWeightState
from ttt_adapt.kernels.inner_loop.models import Shared, Tokens
from ttt_adapt.kernels.inner_loop.problems import make_problem

WEIGHTS = {"ttt_linear": ("weight", "bias"), "ttt_mlp": ("w1", "b1", "w2", "b2")}


class AbsentGpu:
    """What compiling asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_operator(operator: str, dtype: torch.dtype, capability: int) -> dict[str, int]:
    shared_memory: dict[str, int] = {}
    launch = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any):  # type: ignore[no-untyped-def]
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        shared_memory[kernel.metadata.name] = kernel.metadata.shared
        return kernel

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentGpu(capability))
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)

    sizes = {"batch": 2, "length": 40, "heads": 2, "width": 32, "size": 16, "hidden": 64}
    problem = make_problem(operator, dtype=torch.float32, **sizes).to(dtype).learnable()
    tokens = Tokens(**problem.tokens)
    named = problem.shared
    shared = Shared(named["token_scale"], named["ln_weight"], named["ln_bias"])
    weights = tuple(named[name].expand(2, *named[name].shape) for name in WEIGHTS[operator])
    module = f"ttt_adapt.kernels.{operator}"
    core = import_module(f"{module}.autograd").core
    with torch.no_grad():
        core(tokens, shared, weights, None, True)
    out, ended = core(tokens, shared, weights, torch.tensor([40, 17]), True)
    (out.sum() + sum(tensor.sum() for tensor in ended)).backward()
    widths = (32, 32) if operator == "ttt_linear" else (32, 64, 64, 32)
    slots = tuple(torch.zeros(2, 2, 16, width) for width in widths)
    state = FastWeightState(
        tuple(tensor.detach().contiguous() for tensor in weights), slots, torch.tensor([3, 15])
    )
    token = tokens.map(lambda tensor: tensor.detach()[:, :1])
    import_module(f"{module}.decode").decode(token, shared, state)
    return shared_memory


if __name__ == "__main__":
    found = compile_operator(sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(found))
