"""How much of building an index is embedding, and what each FAISS index finds at what cost.

    python benchmarks/index.py [--passages N] [--json] [--write]

Text: Python sources of the running interpreter's standard library, in passages of 1200 bytes.
One build with MiniLM embeddings (where the `offline` extra or a cache has the model) and one with
the weight-free hashing embedder, then several factories over the stored vectors of the former.
All ratios come from one run.
"""

import argparse
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import ChunkSettings, EmbeddingSettings, IndexSettings
from ttt_adapt.corpus import chunk_documents
from ttt_adapt.embedding import load_embedder
from ttt_adapt.errors import TTTAdaptError
from ttt_adapt.indexes import Index, IndexInfo, build_index, measure_recall
from ttt_adapt.runtime import versions
from ttt_adapt.storage import atomic_write, write_json
from ttt_adapt.testing import library_documents
from ttt_adapt.types import Embedder, Passage

FACTORIES = ("Flat", "HNSW32", "IVF64,Flat", "IVF64,SQ8", "SQ8", "IVF64,PQ48x4fs")
NUM_HELD_OUT = 100
RESULTS = Path(__file__).parent / "results"
K = 50


class Stored:
    """An embedder that reads vectors computed before, so that other factories cost no embedding."""

    def __init__(self, embedder: Embedder, passages: list[Passage], index: Index) -> None:
        self.fingerprint = embedder.fingerprint
        self.dimension = embedder.dimension
        self.description = embedder.description
        self._rows = {passage.text: row for row, passage in enumerate(passages)}
        self._vectors_ND = index.all_vectors()

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        return np.array(self._vectors_ND[[self._rows[text] for text in texts]])


def library_passages() -> Iterator[Passage]:
    """The standard library in passages."""
    return chunk_documents(library_documents(), ChunkSettings(size=1200))


def embedders() -> Iterator[tuple[str, Embedder]]:
    """MiniLM, if it is there, and the hashing embedder."""
    try:
        yield "MiniLM", load_embedder(EmbeddingSettings())
    except TTTAdaptError as error:
        print(f"MiniLM left out: {error}", file=sys.stderr)
    yield "hashing", load_embedder(EmbeddingSettings(kind="hashing"))


def measured_build(passages: list[Passage], embedder: Embedder, folder: Path) -> dict[str, Any]:
    """Seconds per stage and rates of one build."""
    start = time.perf_counter()
    info = build_index(passages, embedder, folder, IndexSettings(), origin={"corpus": "stdlib"})
    total_s = time.perf_counter() - start
    return {
        "embedder": embedder.description,
        "factory": info.factory,
        "passages": info.num_passages,
        "megabytes_on_disk": info.num_bytes / 2**20,
        "seconds": dict(info.seconds),
        "total_s": total_s,
        "embedding_share": info.seconds["embed"] / total_s,
        "passages_per_s": info.num_passages / total_s,
        "passages_per_s_without_embedding": info.num_passages / (total_s - info.seconds["embed"]),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measured_factory(
    factory: str, passages: list[Passage], stored: Stored, queries: Any, folder: Path
) -> dict[str, Any]:
    """Recall, time and size of one kind of FAISS index over the same vectors."""
    settings = IndexSettings(factory=factory)
    info: IndexInfo = build_index(passages, stored, folder, settings, origin={"corpus": "stdlib"})
    report = measure_recall(Index.open(folder), k=K, queries_QD=queries)
    faiss_bytes = (folder / "faiss-0000.index").stat().st_size
    return {
        "factory": factory,
        "nprobe": info.nprobe,
        "recall": report.mean,
        "recall_95": [report.low, report.high],
        "ms_per_query": report.ms_per_query,
        "exact_scan_ms_per_query": report.exact_ms_per_query,
        "build_s": sum(info.seconds.get(stage, 0.0) for stage in ("train", "add", "write")),
        "faiss_mb": faiss_bytes / 2**20,
    }


def main() -> None:
    """Run, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=2000, help="passages to index")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    arguments = parser.parse_args()

    # Queries are held-out passages spread over all of them; none is indexed.
    wanted = arguments.passages + NUM_HELD_OUT
    everything = list(itertools.islice(library_passages(), wanted))
    step = max(2, len(everything) // NUM_HELD_OUT)
    held_out = everything[::step][:NUM_HELD_OUT]
    left_out = {passage.id for passage in held_out}
    distinct = {p.text: p for p in everything if p.id not in left_out}
    passages = list(distinct.values())

    builds: dict[str, Any] = {}
    factories: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, embedder in embedders():
            folder = Path(temporary) / name
            builds[name] = measured_build(passages, embedder, folder)
            if factories:
                continue
            stored = Stored(embedder, passages, Index.open(folder))
            queries = embedder.embed([passage.text for passage in held_out])
            for number, factory in enumerate(FACTORIES):
                place = Path(temporary) / f"factory-{number}"
                factories.append(measured_factory(factory, passages, stored, queries, place))
    result: dict[str, Any] = {
        "k": K,
        "num_queries": len(held_out),
        "builds": builds,
        "factories": factories,
        "versions": versions(),
    }
    table = as_markdown(result)
    if arguments.write:
        write_json(RESULTS / "index.json", result)
        with atomic_write(RESULTS / "index.md", "w") as stream:
            stream.write(table)
    print(json.dumps(result, indent=1) if arguments.json else table)


def as_markdown(result: dict[str, Any]) -> str:
    """The tables, for people."""
    lines = [
        "# Building an index, and searching it",
        "",
        "| embedder | passages | s | passages/s | embedding's share | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for build in result["builds"].values():
        lines.append(
            f"| {build['embedder']} | {build['passages']} | {build['total_s']:.1f} "
            f"| {build['passages_per_s']:.0f} | {build['embedding_share']:.1%} "
            f"| {build['peak_rss_mb']:.0f} |"
        )
    lines += [
        "",
        f"Recall of the {result['k']} nearest, {result['num_queries']} queries, 95% interval:",
        "",
        "| index | recall | ms a query | build s | FAISS MB |",
        "|---|---|---|---|---|",
    ]
    for row in result["factories"]:
        low, high = row["recall_95"]
        lines.append(
            f"| {row['factory']} | {row['recall']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {row['ms_per_query']:.2f} | {row['build_s']:.2f} | {row['faiss_mb']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
