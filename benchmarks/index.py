"""How much of building an index is embedding, and what each FAISS index finds at what cost.

    python benchmarks/index.py [--passages N] [--json]

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
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import ChunkSettings, CorpusSettings, EmbeddingSettings, IndexSettings
from ttt_adapt.corpus import chunk_documents, read_documents
from ttt_adapt.embedding import load_embedder
from ttt_adapt.errors import TTTAdaptError
from ttt_adapt.indexes import Index, IndexInfo, build_index, measure_recall
from ttt_adapt.types import Embedder, Passage

FACTORIES = ("Flat", "HNSW32", "IVF64,Flat", "IVF64,SQ8", "SQ8", "IVF64,PQ48x4fs")
NUM_HELD_OUT = 100
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
    """Passages of the standard library, without its tests and installed packages."""
    corpus = CorpusSettings(
        path=sysconfig.get_path("stdlib"),
        format="tree",
        include=("*.py",),
        exclude=("site-packages/", "dist-packages/", "test/", "tests/", "idle_test/"),
        on_error="skip",
    )
    return chunk_documents(read_documents(corpus), ChunkSettings(size=1200))


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
    result = {"k": K, "num_queries": len(held_out), "builds": builds, "factories": factories}
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, build in builds.items():
        stages = ", ".join(f"{stage} {value:.2f}" for stage, value in build["seconds"].items())
        print(
            f"{name} ({build['embedder']}): {build['passages']} passages in "
            f"{build['total_s']:.1f} s, {build['passages_per_s']:.0f}/s; embedding is "
            f"{build['embedding_share']:.1%} of it; peak {build['peak_rss_mb']:.0f} MB\n"
            f"  seconds: {stages}"
        )
    print(f"{'factory':16} recall@{K}      ms/query  build s  FAISS MB")
    for row in factories:
        print(
            f"{row['factory']:16} {row['recall']:.3f}          {row['ms_per_query']:8.2f}"
            f" {row['build_s']:8.2f} {row['faiss_mb']:9.1f}"
        )


if __name__ == "__main__":
    main()
