"""SIFT over a whole corpus of tasks: processor time, memory, and what many target rows cost.

    OMP_NUM_THREADS=1 python benchmarks/selection_large.py [--json] [--write] [--quick]

One thread, float32, λ = 10, no repeats; unit rows in forty families, targets from four of them.
Times are processor seconds: other programs may run beside it. Columns:

- seconds: ``ttt_adapt.selection.sift`` whole: checks, picks, posterior variance.
- ms a pick, and pass: one product of the candidate matrix with a vector, by the same BLAS.
- memory: the most that numpy held at once beyond candidates and targets.
- K × M, K × K: what a covariance of candidates with target rows, and the full covariance that other
  implementations keep, would take in float32.

The second table holds the two ways of many target rows against each other, with equal picks: a
covariance of every candidate with every row, and two products with vectors of length D.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.runtime import versions
from ttt_adapt.selection import screening, sift
from ttt_adapt.storage import atomic_write, write_json

# K candidates, D width, M target rows, N picks.
SHAPES = (
    (50_000, 512, 64, 1000),
    (50_000, 512, 512, 1000),
    (50_000, 512, 4096, 200),
    (200_000, 384, 512, 500),
    (20_000, 1024, 1024, 300),
    (10_000, 384, 384, 3000),
)
QUICK_SHAPES = ((20_000, 256, 64, 200), (20_000, 256, 256, 200))
WAYS = ((20_000, 512, 16), (20_000, 512, 64), (20_000, 512, 128), (20_000, 512, 512))
WAY_PICKS = 60
NOISE_VAR = 10.0
RESULTS = Path(__file__).parent / "results"
Matrix = NDArray[np.float32]


def family_rows(num: int, width: int, num_targets: int) -> tuple[Matrix, Matrix]:
    """Unit candidates ``[num, width]`` and targets, made a block at a time."""
    rng = np.random.default_rng(num + width + num_targets)
    centres = rng.standard_normal((40, width), dtype=np.float32)
    family = rng.integers(0, 40, num + num_targets)
    family[num:] %= 4
    rows = np.empty((num + num_targets, width), dtype=np.float32)
    for start in range(0, len(rows), 4096):
        part = slice(start, start + 4096)
        block = centres[family[part]]
        block += rng.standard_normal(block.shape, dtype=np.float32)
        rows[part] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return rows[:num], rows[num:]


def pass_ms(pool: Matrix) -> float:
    """One product with a vector, processor time, the least of five."""
    vector, out = np.ones(pool.shape[1], np.float32), np.empty(len(pool), np.float32)
    least = float("inf")
    for _ in range(5):
        begun = time.process_time()
        np.dot(pool, vector, out)
        least = min(least, time.process_time() - begun)
    return least * 1e3


def shape_row(num: int, width: int, num_targets: int, num_select: int) -> dict[str, Any]:
    """Time and memory of one call."""
    pool, targets = family_rows(num, width, num_targets)
    tracemalloc.start()
    begun = time.process_time()
    found = sift(pool, targets, num_select=num_select, noise_var=NOISE_VAR, allow_repeats=False)
    seconds = time.process_time() - begun
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "num_candidates": num,
        "dimension": width,
        "num_targets": num_targets,
        "num_select": num_select,
        "cpu_s": seconds,
        "ms_per_pick": seconds / num_select * 1e3,
        "pass_ms": pass_ms(pool),
        "peak_mb": peak / 2**20,
        "candidates_mb": pool.nbytes / 2**20,
        "rows_mb": num * num_targets * 4 / 2**20,
        "square_mb": num * num * 4 / 2**20,
        "variance_left": float(found.posterior_var[-1] / found.prior_var),
    }


def ways_row(num: int, width: int, num_targets: int) -> dict[str, Any]:
    """Processor time of both ways of many target rows, the least of two calls each."""
    pool, targets = family_rows(num, width, num_targets)
    chosen_by_itself = screening.prefers_products(num, width, min(num_targets, width))
    row: dict[str, Any] = {
        "num_candidates": num,
        "dimension": width,
        "num_targets": num_targets,
        "chosen": "products" if chosen_by_itself else "rows",
    }
    picks = []
    own = screening.prefers_products
    for name, products in (("rows", False), ("products", True)):
        # The choice is the library's own; here it is made by hand.
        screening.prefers_products = lambda *shape, answer=products: answer
        least = float("inf")
        for _ in range(2):
            begun = time.process_time()
            found = sift(pool, targets, num_select=WAY_PICKS, noise_var=NOISE_VAR)
            least = min(least, time.process_time() - begun)
        row[f"{name}_cpu_s"] = least
        picks.append(found.indices)
    screening.prefers_products = own
    row["same_picks"] = bool(np.array_equal(picks[0], picks[1]))
    return row


def as_markdown(report: dict[str, Any]) -> str:
    """The tables, for people."""
    lines = [
        "# Selection over a whole corpus: λ = 10, one thread, float32",
        "",
        f"{report['machine']}. Processor seconds.",
        "",
        (
            "| K / D / M / N | seconds | ms a pick | pass | memory MB | candidates MB | K × M MB "
            "| K × K MB |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['num_candidates']:,} / {row['dimension']} / {row['num_targets']} "
        f"/ {row['num_select']} | {row['cpu_s']:.1f} | {row['ms_per_pick']:.1f} "
        f"| {row['pass_ms']:.1f} | {row['peak_mb']:.0f} | {row['candidates_mb']:.0f} "
        f"| {row['rows_mb']:.0f} | {row['square_mb']:,.0f} |"
        for row in report["shapes"]
    ]
    lines += [
        "",
        f"Two ways of many target rows, {WAY_PICKS} picks, processor seconds.",
        "",
        "| K / D / M | covariance with every row | products | chosen | same picks |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['num_candidates']:,} / {row['dimension']} / {row['num_targets']} "
        f"| {row['rows_cpu_s']:.2f} | {row['products_cpu_s']:.2f} | {row['chosen']} "
        f"| {'yes' if row['same_picks'] else 'NO'} |"
        for row in report["ways"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write", action="store_true", help="write both to benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, load {load:.1f} at start",
        "versions": versions(),
        "ways": [ways_row(*shape) for shape in (WAYS[1:2] if arguments.quick else WAYS)],
        "shapes": [shape_row(*shape) for shape in shapes],
    }
    text = as_markdown(report)
    if arguments.write:
        write_json(RESULTS / "selection_large.json", report)
        with atomic_write(RESULTS / "selection_large.md", "w") as stream:
            stream.write(text)
    print(json.dumps(report, indent=1) if arguments.json else text)


if __name__ == "__main__":
    main()
