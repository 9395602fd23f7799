"""TTT-Linear and TTT-MLP on a CPU against the public PyTorch implementations.

    OMP_NUM_THREADS=1 python benchmarks/layers.py \\
        --ttt-lm-pytorch path/to/ttt-lm-pytorch/ttt.py \\
        --fla path/to/flash-linear-attention/fla/ops/ttt/naive.py [--quick] [--json] [--write]

Width 768, 12 heads, mini-batches of 16, one row, float32, one thread, all in one process; the arms
take turns, and a time is the least of several turns, in processor time (on a quiet machine the same
as wall time, which is in the JSON). Before anything is timed, outputs and gradients of ours and of
ttt-lm-pytorch's layer, with the same parameters, must agree.

Measured are the inner forward (the operator alone, no gradients) and the layer forward and backward
(projections, rotary positions, operator, norms; gradients of the input and all parameters).
Arms:

- chunked: this repository's operator and layer.
- plain: the same operator in the plain dual form under autograd (``run_mini_batches``); its layer only
  where the one below is missing.
- ttt-lm-pytorch: its own layer class, from its file as it is; only the configuration object is ours,
  for its own does not survive current transformers. https://github.com/test-time-training/ttt-lm-pytorch
- fla: the naive form of flash-linear-attention, TTT-Linear only, inner forward only; its operator
  is another one (learning rates scale queries, the output adds to LN), so only its time counts.
  https://github.com/fla-org/flash-linear-attention
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib.util
import json
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.kernels.inner_loop.minibatches import run_mini_batches
from ttt_adapt.kernels.inner_loop.models import InnerModel, LinearModel, MlpModel
from ttt_adapt.kernels.ttt_linear import chunked as linear_chunked
from ttt_adapt.kernels.ttt_linear import ttt_linear
from ttt_adapt.kernels.ttt_mlp import chunked as mlp_chunked
from ttt_adapt.kernels.ttt_mlp import ttt_mlp
from ttt_adapt.layers import TTTMLP, TTTLayer, TTTLinear
from ttt_adapt.runtime import set_num_threads, versions
from ttt_adapt.storage import atomic_write, write_json

WIDTH, HEADS, SIZE = 768, 12, 16
LENGTHS, QUICK_LENGTHS = (512, 2048, 8192), (512, 2048)
INNER, LAYER = "inner forward", "layer forward + backward"
PEER = "ttt-lm-pytorch"
RESULTS = Path(__file__).parent / "results"
LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Operator:
    """One operator's pieces by the name of the command line."""

    function: Callable[..., Any]
    layer: Callable[..., TTTLayer]
    inner: InnerModel
    chunked: types.ModuleType
    peer_class: str
    weights: dict[str, str]
    """The operator's and the layer's weights as the peer names them."""


OPERATORS = {
    "linear": Operator(
        ttt_linear, TTTLinear, LinearModel(), linear_chunked, "TTTLinear",
        {"weight": "W1", "bias": "b1"},
    ),
    "mlp": Operator(
        ttt_mlp, TTTMLP, MlpModel(), mlp_chunked, "TTTMLP",
        {"w1": "W1", "b1": "b1", "w2": "W2", "b2": "b2"},
    ),
}  # fmt: skip


def load_module(name: str, path: Path) -> Any:
    """A Python file by its path.

    Raises:
        SystemExit: it is not there or cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SystemExit(f"{path}: expected a Python file; see --help for which")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise SystemExit(f"{path}: cannot be imported here: {error}") from error
    return module


@contextmanager
def plain_form(operator: Operator) -> Iterator[None]:
    """The backend ``chunked`` answered by the plain form."""
    fast = operator.chunked.core
    operator.chunked.core = lambda *args: run_mini_batches(operator.inner, *args)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        operator.chunked.core = fast  # type: ignore[attr-defined]


def make_layer(operator: Operator) -> TTTLayer:
    """Ours, with parameters as a trained one's: no norm or bias at its start."""
    torch.manual_seed(0)
    layer = operator.layer(WIDTH, HEADS, mini_batch_size=SIZE, backend="chunked")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or "bias" in name or "offset" in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return layer


def make_peer(module: Any, operator: Operator, ours: TTTLayer) -> Any:
    """ttt-lm-pytorch's layer with the same parameters."""
    config = types.SimpleNamespace(
        hidden_size=WIDTH, num_attention_heads=HEADS, mini_batch_size=SIZE, share_qk=False,
        conv_kernel=4, rope_theta=10_000.0, use_gate=False, ttt_base_lr=ours.base_lr,
        scan_checkpoint_group_size=0,
    )  # fmt: skip
    peer = getattr(module, operator.peer_class)(config, layer_idx=0)
    given = dict(ours.named_parameters())
    with torch.no_grad():
        for name, theirs in matching(operator).items():
            parameter = peer.get_parameter(theirs)
            parameter.copy_(given[name].view_as(parameter))
    assert len(list(peer.parameters())) == len(given)
    return peer


def matching(operator: Operator) -> dict[str, str]:
    """Our layer's parameters and what the peer calls them."""
    same = ("q_proj", "k_proj", "v_proj", "o_proj", "post_norm")
    names = {f"{name}.weight": f"{name}.weight" for name in same}
    names |= {
        "post_norm.bias": "post_norm.bias",
        "lr_weight": "learnable_ttt_lr_weight",
        "lr_bias": "learnable_ttt_lr_bias",
        "token_scale_offset": "learnable_token_idx",
        "norm_weight": "ttt_norm_weight",
        "norm_bias": "ttt_norm_bias",
    }
    return names | {f"initial_{ours}": theirs for ours, theirs in operator.weights.items()}


Arms = dict[str, Callable[[], Any]]


def inner_arms(operator: Operator, layer: TTTLayer, length: int, peer: Any, fla: Any) -> Arms:
    """The operator alone, each arm's inputs already laid out as it takes them."""
    generator = torch.Generator().manual_seed(1)
    width, count = WIDTH // HEADS, length // SIZE
    q, k, v = (torch.randn(1, length, HEADS, width, generator=generator) for _ in range(3))
    lr = torch.rand(1, length, HEADS, generator=generator) * layer.base_lr / width
    shared = {
        "token_scale": layer.token_scale().detach(),
        "ln_weight": layer.norm_weight.detach(),
        "ln_bias": layer.norm_bias.detach(),
        **{name: weight.detach() for name, weight in layer.initial_weights().items()},
    }

    def ours() -> Any:
        return operator.function(q, k, v, lr, **shared, backend="chunked")[0]

    def plain() -> Any:
        with plain_form(operator):
            return ours()

    arms: Arms = {"chunked": ours, "plain": plain}
    if peer is not None:

        def parted(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.transpose(1, 2).reshape(1, HEADS, count, SIZE, -1).contiguous()

        token_eta = shared["token_scale"].view(1, 1, 1, SIZE, 1).expand(1, HEADS, count, SIZE, 1)
        lr_eta = parted(lr[..., None]).transpose(-1, -2)
        inputs = {"XQ": parted(q), "XK": parted(k), "XV": parted(v)}
        inputs |= {"eta": token_eta * lr_eta, "token_eta": token_eta, "ttt_lr_eta": lr_eta}
        arms[PEER] = lambda: peer.ttt(inputs, SIZE, None)[0].view(1, length, HEADS, width)
        require_agreement(f"inner forward, T = {length}", ours(), arms[PEER]())
    if fla is not None and operator.inner.name == "ttt_linear":
        # It scales the caller's q in place; what it computes with then is no slower.
        own_q, eta = q.clone(), lr[..., None]
        weight, bias = shared["ln_weight"], shared["ln_bias"]
        start = shared["weight"][None].clone(), shared["bias"][None, :, None].clone()
        arms["fla naive"] = lambda: fla.chunk_ttt_linear_ref(
            own_q, k, v, weight, bias, eta, mini_batch_size=SIZE,
            initial_state=start[0], initial_state_bias=start[1],
        )  # fmt: skip
    return arms


def layer_arms(
    operator: Operator, layer: TTTLayer, length: int, peer: Any
) -> tuple[Arms, dict[str, float]]:
    """The whole layer with all gradients, and the megabytes each keeps for its backward pass."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, length, WIDTH, generator=generator).requires_grad_()
    upstream = torch.randn(1, length, WIDTH, generator=generator)
    position = torch.arange(length)[None]
    forwards: dict[str, tuple[torch.nn.Module, Callable[[], torch.Tensor]]] = {
        "chunked": (layer, lambda: layer(hidden)[0])
    }
    if peer is not None:
        forwards[PEER] = (peer, lambda: peer(hidden, position_ids=position))
    else:

        def plain() -> torch.Tensor:
            with plain_form(operator):
                return layer(hidden)[0]

        forwards["plain"] = (layer, plain)

    def turn(module: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        hidden.grad = None
        out = forward()
        out.backward(upstream)  # type: ignore[no-untyped-call]
        return out.detach()

    kept, found = {}, {}
    for name, (module, forward) in forwards.items():
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, into: dict[int, int] = storages) -> torch.Tensor:
            into[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = turn(module, forward)
        for parameter in module.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        kept[name] = sum(storages.values()) / 1e6
        gradients = {key: value.grad for key, value in module.named_parameters()}
        found[name] = {"out": out, "hidden": hidden.grad, **gradients}
    if peer is not None:
        names = {"out": "out", "hidden": "hidden", **matching(operator)}
        for ours, theirs in names.items():
            label = f"layer, T = {length}, {ours}"
            require_agreement(label, found["chunked"][ours], found[PEER][theirs])
    return {name: lambda pair=pair: turn(*pair) for name, pair in forwards.items()}, kept  # type: ignore[misc]


def require_agreement(label: str, ours: Any, theirs: Any) -> None:
    """Raises :class:`SystemExit` where two tensors differ by more than rounding."""
    theirs = theirs.view_as(ours)
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(f"{label}: ours and {PEER}'s differ by {difference:.1e} of the largest")


def take_turns(arms: Arms, num_turns: int) -> dict[str, dict[str, float]]:
    """Least processor and wall seconds of each arm."""
    least = {name: {"cpu_s": float("inf"), "wall_s": float("inf")} for name in arms}
    for _ in range(num_turns):
        for name, arm in arms.items():
            wall, cpu = time.perf_counter(), time.process_time()
            arm()
            taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            least[name] = {key: min(least[name][key], value) for key, value in taken.items()}
    return least


def measure(
    names: list[str], lengths: tuple[int, ...], num_turns: int, peer_module: Any, fla: Any
) -> list[dict[str, Any]]:
    """A row for each operator, length and measure."""
    rows = []
    for name in names:
        operator = OPERATORS[name]
        layer = make_layer(operator)
        peer = None if peer_module is None else make_peer(peer_module, operator, layer)
        for length in lengths:
            with torch.no_grad():
                arms = inner_arms(operator, layer, length, peer, fla)
                rows.append(row_of(name, INNER, length, take_turns(arms, num_turns)))
            arms, kept = layer_arms(operator, layer, length, peer)
            row = row_of(name, LAYER, length, take_turns(arms, num_turns))
            rows.append({**row, "kept_mb": kept})
    return rows


def row_of(
    operator: str, measured: str, length: int, times: dict[str, dict[str, float]]
) -> dict[str, Any]:
    ours = times["chunked"]
    return {
        "operator": operator,
        "measure": measured,
        "num_tokens": length,
        "us_per_token": {name: t["cpu_s"] / length * 1e6 for name, t in times.items()},
        "times_faster_than": {
            name: t["cpu_s"] / ours["cpu_s"] for name, t in times.items() if t is not ours
        },
        "times_faster_than_by_wall": {
            name: t["wall_s"] / ours["wall_s"] for name, t in times.items() if t is not ours
        },
    }


def as_markdown(report: dict[str, Any]) -> str:
    """The table, for people."""
    arms = ["chunked", "plain", PEER, "fla naive"]
    lines = [
        "# TTT layers on a CPU: width 768, 12 heads, b = 16, float32, one thread",
        "",
        f"{report['machine']}. {report['note']}".strip(),
        "",
        "Microseconds of processor time per token; in brackets how many times chunked is faster.",
        "MB: what the layer keeps for its backward pass, chunked / the other.",
        "",
        f"| operator | measure | T | {' | '.join(arms)} | MB |",
        f"|---|---|---|{'---|' * (len(arms) + 1)}",
    ]
    for row in report["rows"]:
        cells = []
        for arm in arms:
            spent = row["us_per_token"].get(arm)
            ratio = row["times_faster_than"].get(arm)
            shown = "–" if spent is None else f"{spent:.1f}"
            cells.append(shown if ratio is None else f"{shown} ({ratio:.2f}×)")
        kept = " / ".join(f"{value:.0f}" for value in row.get("kept_mb", {}).values()) or "–"
        lines.append(
            f"| {row['operator']} | {row['measure']} | {row['num_tokens']} "
            f"| {' | '.join(cells)} | {kept} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(f"--{PEER}", type=Path, metavar="FILE", help="its ttt.py")
    parser.add_argument("--fla", type=Path, metavar="FILE", help="its fla/ops/ttt/naive.py")
    parser.add_argument("--operators", default="linear,mlp", help="which, separated by commas")
    parser.add_argument("--turns", type=int, default=5, help="times each arm runs")
    parser.add_argument("--quick", action="store_true", help="up to 2048 tokens, at most 3 turns")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="write both to benchmarks/results")
    arguments = parser.parse_args()
    names = arguments.operators.split(",")
    unknown = sorted(set(names) - set(OPERATORS))
    if unknown or arguments.turns < 1:
        parser.error(f"expected operators of {', '.join(OPERATORS)} and at least one turn")
    files = {PEER: arguments.ttt_lm_pytorch, "fla": arguments.fla}
    missing = [name for name, path in files.items() if path is None]
    set_num_threads(1)
    peers = {
        name: None if path is None else load_module(f"peer_{name.replace('-', '_')}", path)
        for name, path in files.items()
    }
    load = os.getloadavg()[0]
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS
    turns = min(arguments.turns, 3) if arguments.quick else arguments.turns
    notes = [f"Not measured, for no file was given: {', '.join(missing)}."] if missing else []
    notes += ["Other programs ran beside it."] if load > 0.5 else []
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, load {load:.1f} at start",
        "note": " ".join(notes),
        "versions": versions(),
        "num_turns": turns,
        "rows": measure(names, lengths, turns, peers[PEER], peers["fla"]),
    }
    text = as_markdown(report)
    if arguments.write:
        write_json(RESULTS / "layers.json", report)
        with atomic_write(RESULTS / "layers.md", "w") as stream:
            stream.write(text)
    print(json.dumps(report, indent=1) if arguments.json else text)


if __name__ == "__main__":
    main()
