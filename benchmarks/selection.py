"""SIFT's speed against activeft and against the memory bus, and SIFT-Fast's gap.

    OMP_NUM_THREADS=1 python benchmarks/selection.py [--json] [--write] [--quick]

One thread, N = 50, λ = 0.01, one query row, in milliseconds, the least of several repeats. The pool
is what an index would hand out: the K most similar of 4K vectors with a decaying spectrum.
Columns:

- shipped: ``activeft.sift.Retriever(IndexFlatIP).search(query, N=50, K=K)``, defaults; above a
  thousand candidates it is not exact. Its FAISS search is included (it cannot be left out) and
  shown beside it.
- exact: activeft's VTL over the same candidates without a worker process and without subsampling.
- float32, float64: ``ttt_adapt.selection.sift`` whole: checks, picks, posterior variance.
- pass: fifty products of the candidate matrix with a vector, by the same BLAS, here and now.
- bus: reading the matrix fifty times at the bandwidth of a matrix no cache holds, the best of a
  measurement before each row. Beside other programs it is far below what the machine can do, so
  ``pass`` is the stricter and steadier yardstick.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import SelectionSettings
from ttt_adapt.runtime import set_num_threads, versions
from ttt_adapt.selection import greedy_gap, select, select_batch, sift, sift_fast
from ttt_adapt.storage import atomic_write, write_json

SHAPES = ((200, 384), (200, 1024), (1000, 384), (1000, 1024), (5000, 384), (5000, 1024))
NUM_SELECT, NOISE_VAR = 50, 0.01
EXACT_UP_TO = 1000
RESULTS = Path(__file__).parent / "results"
Matrix = NDArray[np.float32]


def best_ms(run: Callable[[], Any], *, budget_s: float = 3.0, most: int = 400) -> float:
    """Least wall time of repeats until the budget is spent; at least one."""
    least, started = float("inf"), time.perf_counter()
    for _ in range(most):
        begun = time.perf_counter()
        run()
        ended = time.perf_counter()
        least = min(least, ended - begun)
        if ended - started > budget_s:
            break
    return least * 1e3


def retrieved_pool(num: int, width: int, seed: int) -> tuple[Matrix, Matrix]:
    """``[num, width]`` candidates, most similar first, and a query ``[1, width]``; unit rows."""
    rng = np.random.default_rng(seed)
    spectrum = (1.0 + np.arange(width)) ** -0.5
    rows = (rng.standard_normal((4 * num + 1, width)) + rng.standard_normal(width)) * spectrum
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    order = np.argsort(-(rows[1:] @ rows[0]), kind="stable")[:num]
    return rows[1:][order].astype(np.float32), rows[:1].astype(np.float32)


def bus_gigabytes_per_s() -> float:
    """Bytes of a 256 MiB matrix over the time of its product with a vector."""
    matrix = np.ones((65536, 1024), dtype=np.float32)
    vector, out = np.ones(1024, dtype=np.float32), np.empty(65536, dtype=np.float32)
    return matrix.nbytes / best_ms(lambda: np.dot(matrix, vector, out=out), most=20) / 1e6


def fifty_passes_ms(pool: Matrix) -> float:
    """Fifty matrix-vector products over the pool."""
    vector, out = np.ones(pool.shape[1], np.float32), np.empty(len(pool), np.float32)

    def passes() -> None:
        for _ in range(NUM_SELECT):
            np.dot(pool, vector, out)

    return best_ms(passes)


def activeft_times(pool: Matrix, query: Matrix, *, quick: bool) -> dict[str, Any]:
    """Retriever as shipped, its FAISS share, and the exact acquisition without a worker."""
    import faiss
    import torch
    from activeft.acquisition_functions.vtl import VTL
    from activeft.sift import Retriever

    index = faiss.IndexFlatIP(pool.shape[1])
    index.add(pool)
    shares: list[float] = []
    picked: list[Any] = []

    def shipped() -> None:
        _, indices, _, seconds = Retriever(index, device=torch.device("cpu")).search(
            query, N=NUM_SELECT, K=len(pool)
        )
        shares.append(seconds.faiss)
        picked.append(indices)

    result: dict[str, Any] = {
        "activeft_shipped_ms": best_ms(shipped, budget_s=4.0 if quick else 10.0, most=12),
    }
    result["activeft_faiss_ms"] = min(shares) * 1e3
    ours = sift(pool, query, num_select=NUM_SELECT, noise_var=NOISE_VAR).indices
    result["activeft_shipped_same_picks"] = bool(np.array_equal(picked[-1], ours))
    if len(pool) <= EXACT_UP_TO:

        def exact() -> None:
            acquisition = VTL(
                target=torch.tensor(query),
                num_workers=0,
                subsample=False,
                noise_std=float(np.sqrt(NOISE_VAR)),
                mini_batch_size=len(pool),
            )
            chosen, _ = acquisition.select_from_minibatch(
                NUM_SELECT, None, torch.tensor(pool), torch.device("cpu")
            )
            picked.append(np.asarray(chosen))

        result["activeft_exact_ms"] = best_ms(exact, budget_s=2.0 if quick else 6.0, most=10)
        result["activeft_exact_same_picks"] = bool(np.array_equal(picked[-1], ours))
    return result


def shape_row(num: int, width: int, *, quick: bool) -> dict[str, Any]:
    """All times of one shape."""
    pool, query = retrieved_pool(num, width, seed=num + width)
    wide, wide_query = pool.astype(np.float64), query.astype(np.float64)

    def ours(candidates: Any, queries: Any) -> float:
        return best_ms(
            lambda: sift(candidates, queries, num_select=NUM_SELECT, noise_var=NOISE_VAR)
        )

    row: dict[str, Any] = {"num_candidates": num, "dimension": width}
    row |= activeft_times(pool, query, quick=quick)
    row["pass_ms"] = fifty_passes_ms(pool)
    row["float32_ms"] = ours(pool, query)
    row["float64_ms"] = ours(wide, wide_query)
    row["times_faster_than_shipped"] = row["activeft_shipped_ms"] / row["float32_ms"]
    row["over_pass"] = row["float32_ms"] / row["pass_ms"]
    return row


def gap_row(num: int, width: int) -> dict[str, Any]:
    """SIFT-Fast against SIFT on five pools."""
    gaps, shared = [], []
    for seed in range(5):
        pool, query = retrieved_pool(num, width, seed)
        exact = sift(pool, query, num_select=NUM_SELECT, noise_var=NOISE_VAR)
        fast = sift_fast(pool, query, num_select=NUM_SELECT, noise_var=NOISE_VAR)
        gaps.append(greedy_gap(fast, exact))
        shared.append(len(set(fast.indices.tolist()) & set(exact.indices.tolist())))
    return {
        "num_candidates": num,
        "dimension": width,
        "fast_ms": best_ms(
            lambda: sift_fast(pool, query, num_select=NUM_SELECT, noise_var=NOISE_VAR)
        ),
        "variance_ratio_mean": float(np.mean(gaps)),
        "variance_ratio_max": float(np.max(gaps)),
        "distinct_picks_shared_mean": float(np.mean(shared)),
    }


def batch_row(num: int, width: int, num_queries: int = 64) -> dict[str, Any]:
    """Queries per second over one pool: one by one and in one call, with equal results."""
    pool, query = retrieved_pool(num, width, seed=1)
    rng = np.random.default_rng(2)
    queries = [
        (query + 0.5 * rng.standard_normal(query.shape) / width**0.5).astype(np.float32)
        for _ in range(num_queries)
    ]
    settings = SelectionSettings(num_select=NUM_SELECT, noise_var=NOISE_VAR)
    alone = [select(pool, one, settings) for one in queries]
    together = select_batch(pool, queries, settings)
    same = all(np.array_equal(a.indices, b.indices) for a, b in zip(alone, together, strict=True))
    one_by_one = best_ms(lambda: [select(pool, one, settings) for one in queries])
    batch = best_ms(lambda: select_batch(pool, queries, settings))
    return {
        "num_candidates": num,
        "dimension": width,
        "num_queries": num_queries,
        "one_by_one_queries_per_s": num_queries / one_by_one * 1e3,
        "batch_queries_per_s": num_queries / batch * 1e3,
        "same_picks": same,
    }


def as_markdown(report: dict[str, Any]) -> str:
    """The tables, for people."""
    lines = [
        "# Selection: N = 50, λ = 0.01, one query row, one thread",
        "",
        (
            f"{report['machine']}; a matrix no cache holds is read at {report['bus_gb_per_s']:.1f} "
            f"GB/s. {report['note']}"
        ),
        "",
        "Milliseconds, the least of several repeats.",
        "",
        (
            "| K / D | activeft shipped | of it FAISS | activeft exact | float32 | float64 | pass | bus "
            "| shipped / float32 | float32 / pass | float32 / bus |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["shapes"]:
        exact = f"{row['activeft_exact_ms']:.0f}" if "activeft_exact_ms" in row else "–"
        mark = "" if row["activeft_shipped_same_picks"] else " (other picks)"
        lines.append(
            f"| {row['num_candidates']} / {row['dimension']} "
            f"| {row['activeft_shipped_ms']:.0f}{mark} | {row['activeft_faiss_ms']:.1f} | {exact} "
            f"| {row['float32_ms']:.2f} | {row['float64_ms']:.2f} | {row['pass_ms']:.2f} "
            f"| {row['bus_ms']:.2f} | {row['times_faster_than_shipped']:.0f}× "
            f"| {row['over_pass']:.2f} | {row['over_bus']:.2f} |"
        )
    lines += [
        "",
        "SIFT-Fast against SIFT, five pools each: final posterior variance, ratio.",
        "",
        "| K / D | SIFT-Fast ms | mean ratio | largest ratio | distinct picks shared |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['num_candidates']} / {row['dimension']} | {row['fast_ms']:.1f} "
        f"| {row['variance_ratio_mean']:.3f} | {row['variance_ratio_max']:.3f} "
        f"| {row['distinct_picks_shared_mean']:.1f} |"
        for row in report["gaps"]
    ]
    lines += [
        "",
        "Many queries over one pool, queries per second.",
        "",
        "| K / D | queries | one by one | one call | ratio | same picks |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['num_candidates']} / {row['dimension']} | {row['num_queries']} "
        f"| {row['one_by_one_queries_per_s']:.0f} | {row['batch_queries_per_s']:.0f} "
        f"| {row['batch_queries_per_s'] / row['one_by_one_queries_per_s']:.2f} "
        f"| {'yes' if row['same_picks'] else 'NO'} |"
        for row in report["batches"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write", action="store_true", help="write both to benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="K up to 1000, fewer repeats")
    arguments = parser.parse_args()
    # activeft: numpy conversions of its own.
    warnings.filterwarnings("ignore", module="activeft")
    set_num_threads(1)
    shapes = [shape for shape in SHAPES if not arguments.quick or shape[0] <= 1000]
    load = os.getloadavg()[0]
    bus, rows = 0.0, []
    for num, width in shapes:
        bus = max(bus, bus_gigabytes_per_s())
        rows.append(shape_row(num, width, quick=arguments.quick))
    for row in rows:
        row["bus_ms"] = NUM_SELECT * row["num_candidates"] * row["dimension"] * 4 / bus / 1e6
        row["over_bus"] = row["float32_ms"] / row["bus_ms"]
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, load {load:.1f} at start",
        "note": "Other programs ran beside it." if load > 0.5 else "",
        "versions": versions(),
        "bus_gb_per_s": bus,
        "shapes": rows,
        "gaps": [gap_row(200, 384), gap_row(1000, 1024)],
        "batches": [batch_row(200, 384), batch_row(1000, 1024)],
    }
    text = as_markdown(report)
    if arguments.write:
        write_json(RESULTS / "selection.json", report)
        with atomic_write(RESULTS / "selection.md", "w") as stream:
            stream.write(text)
    print(json.dumps(report, indent=1) if arguments.json else text)


if __name__ == "__main__":
    main()
