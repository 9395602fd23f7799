"""TTT layers on a GPU: nanoseconds per token, next to attention, and what the hardware would allow.

    PYTHONPATH=. python benchmarks/gpu.py --device cuda [--json] [--quick] [--tune]

Needs torch and triton. Inner operators alone, causal, bfloat16, head width 64, mini-batches of 16, 32
heads, rows enough for 512 programs; a token is one position of one row, all 32 heads of it. Least of
several repeats.

- forward: without anything kept for a backward; training: with checkpoints kept.
- roofline: the time that the bytes which must be moved, or the operations which must be done, would
  take at the device's bandwidth and tensor-core rate, over the time that it took. Checkpoints count;
  what stays in the cache (the backward's scratch, the MLP's weights) does not. The work is counted
  once, whatever number of tensor-core passes a kernel takes for float32's accuracy.
- bandwidth: of the device's properties where torch knows them, else of a copy; tensor-core rate: of a
  large product, here and now. --bandwidth and --tensor-rate set them.
- attention: ``scaled_dot_product_attention``, causal, same shapes; fla: ``fused_chunk_ttt_linear``, if
  the package is there (another operator: its learning rates belong to queries).
- targets, on an H200: linear forward 10 ns, MLP forward 80 ns, backward 3.5 times the forward.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ttt_adapt.kernels.inner_loop.problems import Problem, make_problem

HEADS, PROGRAMS, SIZE = 32, 512, 16
LENGTHS = (2048, 8192, 32768)
TARGETS_NS = {"ttt_linear": 10.0, "ttt_mlp": 80.0}
TARGET_BACKWARD = 3.5
Run = Callable[[], Any]


def best_s(run: Run, *, budget_s: float = 1.0, most: int = 30) -> float:
    """Least time of repeats until the budget is spent, after two to warm up."""
    for _ in range(2):
        run()
    least, started = float("inf"), time.perf_counter()
    for _ in range(most):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begun)
        if time.perf_counter() - started > budget_s:
            break
    return least


def measured_bandwidth() -> float:
    """Bytes per second, read and written, of copying 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / best_s(lambda: target.copy_(source))


def bandwidth() -> tuple[float, str]:
    """Bytes per second and where the figure is from."""
    properties = torch.cuda.get_device_properties("cuda")
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    width_bits = getattr(properties, "memory_bus_width", 0)
    if clock_khz and width_bits:
        return 2e3 * clock_khz * width_bits / 8, "properties"
    return measured_bandwidth(), "a copy"


def measured_tensor_rate() -> float:
    """Operations per second of a bfloat16 product of 8192³."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / best_s(lambda: a @ a)


def work(operator: str, width: int) -> dict[str, tuple[float, float]]:
    """Bytes and operations of a token and head by pass; bfloat16 tokens, float32 rates and states."""
    row = 2 * width
    kept = 4 * width  # a float32 D·D every D tokens
    if operator == "ttt_linear":
        attention = 4 * SIZE * width
        forward = 6 * width * width + attention
        backward = 20 * width * width + 4 * attention
    else:
        hidden = 4 * width
        attention = 4 * SIZE * (width + hidden)
        forward = 14 * width * hidden + attention
        backward = 3 * forward
        kept = 0  # a state every √(T / b) mini-batches
    return {
        "forward": (4 * row + 4, forward),
        "training": (4 * row + 4 + kept, forward),
        "backward": (7 * row + 8 + kept, backward),
    }


def decode_bytes(operator: str, width: int) -> float:
    """Of a token and head: the state before it is read, the state after it written, float32."""
    hidden = 4 * width
    weights = width * width if operator == "ttt_linear" else 2 * width * hidden
    slots = 2 * width if operator == "ttt_linear" else 2 * (width + hidden)
    return 8.0 * (weights + SIZE * slots)


def on_gpu(operator: str, batch: int, length: int, width: int) -> Problem:
    """Values of a trained layer's size, made on the CPU for one mini-batch and repeated."""
    problem = make_problem(
        operator, batch=batch, length=SIZE, heads=HEADS, width=width, size=SIZE, hidden=4 * width,
        dtype=torch.float32,
    ).to(torch.bfloat16)  # fmt: skip
    tokens = {
        name: tensor.to("cuda").repeat(1, length // SIZE, *(1,) * (tensor.ndim - 2))
        for name, tensor in problem.tokens.items()
    }
    shared = {name: tensor.to("cuda") for name, tensor in problem.shared.items()}
    return Problem(operator, tokens, shared, SIZE)


def times(
    forward: Run, learning: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Any:
    """Seconds of the forward under no_grad, of the forward that keeps what backward needs, of backward."""
    with torch.no_grad():
        found = {"forward": best_s(forward)}
    found["training"] = best_s(learning)
    out = learning()
    upstream = torch.randn_like(out)
    found["backward"] = best_s(
        lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    )
    return found


def ttt_times(operator: str, batch: int, length: int, width: int) -> Any:
    problem = on_gpu(operator, batch, length, width)
    leaf = problem.learnable()
    return times(
        lambda: problem.run(backend="triton"),
        lambda: leaf.run(backend="triton")[0],
        list(leaf.leaves().values()),
    )


def attention_times(batch: int, length: int, width: int) -> Any:
    leaves = [
        torch.randn(
            batch, HEADS, length, width, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(3)
    ]
    run = lambda: scaled_dot_product_attention(*leaves, is_causal=True)
    return times(run, run, leaves)


def fla_times(batch: int, length: int, width: int) -> Any:
    from fla.ops.ttt import fused_chunk_ttt_linear

    problem = on_gpu("ttt_linear", batch, length, width)
    tokens = {n: t.detach().bfloat16().requires_grad_() for n, t in problem.tokens.items()}
    eta = tokens.pop("lr").unsqueeze(-1).detach().requires_grad_()
    ln_weight, ln_bias = (problem.shared[n].bfloat16() for n in ("ln_weight", "ln_bias"))
    run = lambda: fused_chunk_ttt_linear(
        **tokens, w=ln_weight, b=ln_bias, eta=eta, chunk_size=SIZE
    )[0]
    return times(run, run, [*tokens.values(), eta])


def decode_s(operator: str, batch: int, width: int) -> float:
    """Seconds for one token of every row, from the middle of a mini-batch."""
    problem = on_gpu(operator, batch, 2 * SIZE, width)
    with torch.no_grad():
        middle = SIZE + SIZE // 2
        _, state = problem.part(0, middle).run(backend="triton", output_final_state=True)
        token = problem.part(middle, middle + 1)
        return best_s(
            lambda: token.run(backend="triton", initial_state=state, output_final_state=True)
        )


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or in one line why there is none; frees what it held."""
    try:
        return run()
    except torch.OutOfMemoryError:
        return "out of memory"
    except NotImplementedError:
        return "not implemented"
    finally:
        torch.cuda.empty_cache()


def rows_of(
    lengths: Sequence[int], width: int, bytes_per_s: float, operations_per_s: float
) -> list[dict[str, Any]]:
    """A row for each operator and length."""
    rows: list[dict[str, Any]] = []
    batch = -(-PROGRAMS // HEADS)
    runs: dict[str, Callable[[int], Any]] = {
        "ttt_linear": lambda length: ttt_times("ttt_linear", batch, length, width),
        "ttt_mlp": lambda length: ttt_times("ttt_mlp", batch, length, width),
        "attention": lambda length: attention_times(batch, length, width),
    }
    if importlib.util.find_spec("fla") is not None:
        runs["fla_ttt_linear"] = lambda length: fla_times(batch, length, width)
    for length in lengths:
        for name, run in runs.items():
            row: dict[str, Any] = {"operator": name, "length": length, "rows": batch}
            found = attempt(lambda run=run, length=length: run(length))
            if isinstance(found, str):
                rows.append({**row, "problem": found})
                continue
            for which, seconds in found.items():
                row[f"{which}_ns"] = seconds * 1e9 / (batch * length)
            row["backward_over_training"] = found["backward"] / found["training"]
            if name in TARGETS_NS:
                row["forward_target_ns"] = TARGETS_NS[name]
                for which, (num_bytes, operations) in work(name, width).items():
                    least = max(num_bytes / bytes_per_s, operations / operations_per_s)
                    row[f"{which}_bytes"] = num_bytes * HEADS
                    row[f"{which}_roofline"] = least * HEADS * batch * length / found[which]
            rows.append(row)
    return rows


def decode_rows(width: int, bytes_per_s: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for operator in TARGETS_NS:
        for batch in (1, 16, 64):
            found = attempt(lambda o=operator, b=batch: decode_s(o, b, width))
            row: dict[str, Any] = {"operator": operator, "rows": batch}
            if isinstance(found, str):
                rows.append({**row, "problem": found})
                continue
            num_bytes = decode_bytes(operator, width) * HEADS * batch
            row["step_us"] = found * 1e6
            row["step_bytes"] = num_bytes
            row["roofline"] = num_bytes / bytes_per_s / found
            rows.append(row)
    return rows


def tuning_rows(width: int) -> list[dict[str, Any]]:
    """TTT-Linear at other launches and ways of multiplying, T = 2048."""
    from ttt_adapt.kernels.inner_loop.models import Shared, Tokens
    from ttt_adapt.kernels.inner_loop.triton_support import Launch
    from ttt_adapt.kernels.ttt_linear.backward import backward
    from ttt_adapt.kernels.ttt_linear.forward import forward

    batch, length = -(-PROGRAMS // HEADS), 2048
    problem = on_gpu("ttt_linear", batch, length, width)
    tokens, named = Tokens(**problem.tokens), problem.shared
    shared = Shared(named["token_scale"], named["ln_weight"], named["ln_bias"])
    weights = tuple(named[n].expand(batch, *named[n].shape) for n in ("weight", "bias"))
    rows: list[dict[str, Any]] = []
    for mode in ("split", "bf16", "tf32"):
        for num_warps in (2, 4, 8):
            for registers in (0, 128, 168):
                options: dict[str, Any] = {
                    "mode": mode,
                    "launch": Launch(num_warps, max_registers=registers),
                }
                kept = forward(tokens, shared, weights, None, save=True, **options)
                assert kept.checkpoints is not None
                inputs = (tokens, shared, None, kept.checkpoints, kept.out, None)
                found = {
                    "forward": lambda o=options: forward(
                        tokens, shared, weights, None, save=False, **o
                    ),
                    "backward": lambda o=options, i=inputs: backward(*i, **o),
                }
                row = {"mode": mode, "num_warps": num_warps, "max_registers": registers}
                row |= {f"{n}_ns": best_s(f) * 1e9 / (batch * length) for n, f in found.items()}
                rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row.get(column, row.get("problem", "–")) for column in columns]
        lines.append(
            "| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    return lines


def as_text(report: dict[str, Any]) -> str:
    device = report["device"]
    bandwidth = f"{device['bandwidth'] / 1e9:.0f} GB/s ({device['bandwidth_from']})"
    rate = f"{device['tensor_rate'] / 1e12:.0f} TFLOP/s (bfloat16)"
    lines = [
        f"# {device['name']}: {bandwidth}, {rate}",
        "",
        f"ns per token of {HEADS} heads, D = {report['width']}, b = {SIZE}; roofline: of the possible",
        "",
    ]
    lines += table(
        report["passes"],
        ("operator", "length", "forward_ns", "forward_target_ns", "forward_roofline", "training_ns",
         "training_roofline", "backward_ns", "backward_over_training", "backward_roofline"),
    )  # fmt: skip
    lines += [
        "",
        f"target for backward_over_training: {TARGET_BACKWARD}",
        "",
        "Decoding, one step:",
        "",
    ]
    lines += table(report["decode"], ("operator", "rows", "step_us", "step_bytes", "roofline"))
    if report["tuning"]:
        names = ("mode", "num_warps", "max_registers", "forward_ns", "backward_ns")
        lines += ["", "TTT-Linear, T = 2048:", "", *table(report["tuning"], names)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1 and so on")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="T = 2048 only")
    parser.add_argument("--tune", action="store_true", help="other launches of TTT-Linear, too")
    parser.add_argument("--width", type=int, default=64, choices=(32, 64, 128), help="head width")
    parser.add_argument("--bandwidth", type=float, help="of the device's memory, GB/s")
    parser.add_argument(
        "--tensor-rate", type=float, help="of its tensor cores in bfloat16, TFLOP/s"
    )
    arguments = parser.parse_args()
    if not arguments.device.startswith("cuda") or not torch.cuda.is_available():
        print(
            f"gpu.py: expected a CUDA device, found {torch.cuda.device_count()} and --device "
            f"{arguments.device}; run it where torch.cuda.is_available()",
            file=sys.stderr,
        )
        sys.exit(2)
    torch.cuda.set_device(arguments.device)
    width, lengths = arguments.width, LENGTHS[:1] if arguments.quick else LENGTHS
    if arguments.bandwidth:
        bytes_per_s, source = arguments.bandwidth * 1e9, "option"
    else:
        bytes_per_s, source = bandwidth()
    rate = arguments.tensor_rate * 1e12 if arguments.tensor_rate else measured_tensor_rate()
    report: dict[str, Any] = {
        "device": {
            "name": torch.cuda.get_device_name(),
            "bandwidth": bytes_per_s,
            "bandwidth_from": source,
            "tensor_rate": rate,
        },
        "torch": torch.__version__,
        "width": width,
        "passes": rows_of(lengths, width, bytes_per_s, rate),
        "decode": decode_rows(width, bytes_per_s),
        "tuning": tuning_rows(width) if arguments.tune else [],
    }
    print(json.dumps(report, indent=1) if arguments.json else as_text(report))


if __name__ == "__main__":
    main()
