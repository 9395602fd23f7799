"""Vision-TTT against attention over resolutions: time, peak memory, multiply-adds; who is linear.

    OMP_NUM_THREADS=1 python benchmarks/vision.py [--quick] [--json] [--write]
    PYTHONPATH=. python benchmarks/vision.py --device cuda [--quick] [--json]

Sides 224 to 1280 pixels, patches of 16: 196 to 6400 tokens. Models of one width and depth, weights as
they begin; the arms take turns in one process, and a time is the least of several turns. On a CPU:
batches of one image, float32, one thread, processor time (on a quiet machine the same as wall time). On a GPU: 64 images (as in the paper), bfloat16, unless told.

- Vision-TTT: the whole model, both directions.
- attention, fused: the ViT of the same size with torch's ``scaled_dot_product_attention``, which on
  most devices never writes the T × T matrix.
- attention, T × T written: the same with the matrix in memory, as in DeiT's code.

Peak memory is what is allocated at once beyond weights and images: by torch's allocator, so it does not
depend on the machine's other work. Figure 6 of Vision-TTT (arXiv 2603.00518) has, on an L40S at 1280
pixels and against DeiT, 4.72 times the throughput for tiny models, and 89 % less memory.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from ttt_adapt.vision.scaling import Measurement

RESULTS = Path(__file__).parent / "results"
SIDES, QUICK_SIDES = (224, 384, 512, 768, 1024, 1280), (224, 384, 512)


def as_markdown(report: dict[str, Any]) -> str:
    """The table, for people."""
    lines = [
        f"# Vision-TTT {report['size']} and attention over resolutions",
        "",
        f"{report['machine']}; {report['mode']}, batches of {report['batch_size']}, "
        f"{report['dtype']}. {report['note']}".strip(),
        "",
        "In brackets: how many times as much as Vision-TTT in the same run.",
        "",
        "| side | tokens | model | GMACs | ms | images/s | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = {row["resolution"]: row for row in report["rows"] if row["label"] == report["ours"]}
    for row in report["rows"]:
        base = ours[row["resolution"]]
        times, memory = (row[key] / base[key] for key in ("seconds", "peak_bytes"))
        mine = row["label"] == report["ours"]
        lines.append(
            f"| {row['resolution']} | {row['num_tokens']} | {row['label']} | {row['gmacs']:.2f} "
            f"| {1e3 * row['seconds']:.1f}{'' if mine else f' ({times:.2f}×)'} "
            f"| {row['images_per_s']:.2f} "
            f"| {row['peak_bytes'] / 1e6:.1f}{'' if mine else f' ({memory:.2f}×)'} |"
        )
    return "\n".join([*lines, "", *(f"- {line}" for line in report["lines"])]) + "\n"


def machine(device: str) -> str:
    """What it ran on."""
    import torch

    if device == "cuda":
        return str(torch.cuda.get_device_name())
    load = os.getloadavg()[0]
    return (
        f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} thread, "
        f"load {load:.1f} at start"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="tiny", choices=("tiny", "small", "base"))
    parser.add_argument("--sides", help="pixels, separated by commas")
    parser.add_argument("--batch-size", type=int, help="images at once")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--turns", type=int, default=3, help="times each arm runs, at most")
    parser.add_argument("--quick", action="store_true", help="up to 512 pixels, two turns")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="write both to benchmarks/results")
    arguments = parser.parse_args()
    if importlib.util.find_spec("pydantic") is None:
        # A machine for the kernels alone, with torch and triton.
        sys.exit("vision.py: expected the library's packages, found no pydantic; pip install -e .")
    import torch

    from ttt_adapt.runtime import versions
    from ttt_adapt.storage import atomic_write, write_json
    from ttt_adapt.vision.scaling import default_arms, measure, summarise

    cuda = arguments.device == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    sides = QUICK_SIDES if arguments.quick else SIDES
    if arguments.sides:
        sides = tuple(int(side) for side in arguments.sides.split(","))
    dtype = arguments.dtype or ("bfloat16" if cuda else "float32")
    batch_size = arguments.batch_size or (64 if cuda else 1)
    arms = default_arms(arguments.size)
    load, place = os.getloadavg()[0], machine(arguments.device)

    def report_row(row: "Measurement") -> None:
        print(f"{row.resolution} {row.label}: {row.seconds:.3f} s", file=sys.stderr)

    rows = measure(
        arms,
        sides,
        batch_size=batch_size,
        mode="training" if arguments.training else "inference",
        device=arguments.device,
        dtype=getattr(torch, dtype),
        num_turns=min(arguments.turns, 2) if arguments.quick else arguments.turns,
        report=report_row,
    )
    labels = [arm.label for arm in arms]
    report: dict[str, Any] = {
        "size": arguments.size,
        "ours": labels[0],
        "machine": place,
        "note": "Other programs ran beside it." if load > 0.5 and not cuda else "",
        "mode": "forward and backward" if arguments.training else "forward",
        "batch_size": batch_size,
        "dtype": dtype,
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
        **summarise(rows, labels),
    }
    text = as_markdown(report)
    if arguments.write:
        name = "vision-cuda" if cuda else "vision"
        write_json(RESULTS / f"{name}.json", report)
        with atomic_write(RESULTS / f"{name}.md", "w") as stream:
            stream.write(text)
    print(json.dumps(report, indent=1) if arguments.json else text)


if __name__ == "__main__":
    main()
