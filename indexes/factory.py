"""Which FAISS index: chosen from size and memory, or checked when given."""

import math
import re
from dataclasses import dataclass
from typing import Any

from ttt_adapt.errors import SettingsError

MEBIBYTE = 2**20
# FAISS' k-means wants this many training points for each centroid; fewer make lopsided lists.
POINTS_PER_CENTROID = 39
# Product quantisers of 8 bits have 256 centroids per piece.
_PQ_POINTS = 256 * POINTS_PER_CENTROID
# One exact scan of this many bytes costs about as much as embedding the query did.
_FLAT_BYTES = 256 * MEBIBYTE
# HNSW is built by one thread, for the sake of reproducible files: about 1 ms a vector.
_HNSW_VECTORS = 400_000
_HNSW_LINKS = 32
_MAX_NLIST = 65_536
# Learning on what is found takes seconds, so recall is worth milliseconds.
_NPROBE_SHARE = 8
_MIN_NPROBE = 16
_PQ_PIECES = (128, 96, 64, 48, 32, 24, 16, 8)
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class FactoryChoice:
    """A FAISS index and why.

    Attributes:
        factory: FAISS factory string.
        nprobe: inverted lists to visit; ``None`` where there are none.
        memory_bytes: what FAISS holds in memory when searching, estimated. Raw vectors and
            passages stay on disk, memory-mapped, and do not count.
        explanation: one or two sentences for people.
    """

    factory: str
    nprobe: int | None
    memory_bytes: int
    explanation: str


@dataclass(frozen=True, slots=True)
class _Option:
    factory: str
    memory_bytes: int
    reason: str
    nlist: int | None = None


def choose_factory(
    num_vectors: int,
    dimension: int,
    memory_budget_mb: int,
    *,
    train_vectors: int = 200_000,
) -> FactoryChoice:
    """The most faithful index that fits the budget: exact while small, compressed when it must.

    Args:
        num_vectors: N, at least 1.
        dimension: D.
        memory_budget_mb: MiB that FAISS may hold while searching.
        train_vectors: at most this many vectors train the index, which limits the number of lists.

    Raises:
        SettingsError: a number below 1.
    """
    if min(num_vectors, dimension, memory_budget_mb, train_vectors) < 1:
        raise SettingsError(
            "choosing an index needs at least 1 vector, 1 dimension, 1 MB and 1 training vector; "
            f"found {num_vectors}, {dimension}, {memory_budget_mb}, {train_vectors}"
        )
    options = _options(num_vectors, dimension, train_vectors)
    budget = memory_budget_mb * MEBIBYTE
    fitting = [option for option in options if option.memory_bytes <= budget]
    chosen = fitting[0] if fitting else min(options, key=lambda option: option.memory_bytes)
    size = f"{num_vectors:,} vectors of {dimension} dimensions"
    memory = f"{_megabytes(chosen.memory_bytes)} of the {memory_budget_mb:,} MB budget"
    if not fitting:
        memory = (
            f"{_megabytes(chosen.memory_bytes)}, more than the {memory_budget_mb:,} MB budget "
            "(nothing that can be trained on so few vectors is smaller)"
        )
    return FactoryChoice(
        factory=chosen.factory,
        nprobe=default_nprobe(chosen.nlist),
        memory_bytes=chosen.memory_bytes,
        explanation=f"{chosen.factory}: {chosen.reason}. {size} take {memory}.",
    )


def _options(num_vectors: int, dimension: int, train_vectors: int) -> list[_Option]:
    """All that can be trained, most wanted first."""
    num_training = min(num_vectors, train_vectors)
    nlist = _nlist(num_vectors, num_training)
    flat_bytes = 4 * num_vectors * dimension
    # Level 0 has twice the links; higher levels together hold about 1/31 of the vectors.
    link_bytes = num_vectors * (4 * 2 * _HNSW_LINKS + 4 * _HNSW_LINKS // 31 + 12)
    list_bytes = _ID_BYTES * num_vectors + 4 * nlist * (dimension + 2)
    ivf = f"IVF{nlist},"
    flat = _Option("Flat", flat_bytes, "an exact scan, the best there is at this size")
    hnsw = _Option(
        f"HNSW{_HNSW_LINKS}",
        flat_bytes + link_bytes,
        "a neighbour graph over uncompressed vectors, faster than a scan at this size",
    )
    ivf_flat = _Option(
        f"{ivf}Flat",
        flat_bytes + list_bytes,
        f"uncompressed vectors in {nlist} lists, of which a search visits a few",
        nlist,
    )
    if flat_bytes <= _FLAT_BYTES:
        options = [flat]
    elif num_vectors <= _HNSW_VECTORS:
        options = [hnsw, ivf_flat, flat]
    else:
        options = [ivf_flat, flat]
    scalar = "one byte a number, because uncompressed vectors exceed the memory budget"
    scan = _Option("SQ8", num_vectors * dimension, scalar)
    lists = _Option(f"{ivf}SQ8", num_vectors * dimension + list_bytes, scalar, nlist)
    options += [scan] if options == [flat] or nlist == 1 else [lists, scan]
    if num_training >= _PQ_POINTS:
        for pieces in (p for p in _PQ_PIECES if p <= dimension):
            rotated = pieces * max(1, min(4, dimension // pieces))
            tables = 4 * rotated * (dimension + 256 + nlist)
            options.append(
                _Option(
                    f"OPQ{pieces}_{rotated},{ivf}PQ{pieces}",
                    num_vectors * (pieces + _ID_BYTES) + tables,
                    f"{pieces} bytes a vector, because one byte a number exceeds the memory "
                    "budget; candidates are re-scored with the raw vectors on disk",
                    nlist,
                )
            )
    return options


def _nlist(num_vectors: int, num_training: int) -> int:
    """A power of two near 4·√N that the training vectors suffice for."""
    most = min(4.0 * math.sqrt(num_vectors), num_training / POINTS_PER_CENTROID, _MAX_NLIST)
    return int(2 ** int(math.log2(max(1.0, most))))


def default_nprobe(nlist: int | None) -> int | None:
    """Lists a search visits at first: an eighth, at least 16; ``None`` without lists."""
    if nlist is None:
        return None
    return min(nlist, max(_MIN_NPROBE, nlist // _NPROBE_SHARE))


def nlist_of(factory: str) -> int | None:
    """The number of inverted lists that a factory string asks for."""
    found = re.search(r"IVF(\d+)([km]?)", factory)
    if not found:
        return None
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[found[2]]


def stores_raw_vectors(factory: str) -> bool:
    """Whether FAISS' own scores are exact, so that ties in them are ties."""
    kept = r"(IDMap2?,)?(IVF\d+[km]?(_HNSW\d+)?,Flat|Flat|HNSW\d+(,Flat)?)"
    return re.fullmatch(kept, factory) is not None


def depends_on_threads(factory: str) -> bool:
    """Whether training or adding with several threads can give other bytes than with one."""
    return re.search(r"HNSW|OPQ|PCA|ITQ|RQ|LSQ|RCQ|Residual", factory) is not None


def fast_scan_table_bytes(factory: str) -> int:
    """What FAISS may allocate beyond the file for a fast-scan index: 16 floats per list and piece."""
    found = re.search(r"PQ(\d+)x4fs", factory)
    return 4 * 16 * int(found[1]) * (nlist_of(factory) or 0) if found else 0


def new_index(factory: str, dimension: int) -> Any:
    """An empty FAISS index for inner products.

    Raises:
        SettingsError: FAISS cannot make it, or not for inner products, or not in batches.
    """
    import faiss

    if not factory.strip():
        raise SettingsError("factory: expected 'auto' or a FAISS factory string, found ''")
    if re.search(r"NSG|NNDescent", factory):
        raise SettingsError(
            f"factory: {factory!r} cannot be built in batches, so not in bounded memory; "
            "HNSW32 is the graph index that can"
        )
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, AssertionError) as error:
        # FAISS puts its C++ signature first and the reason last.
        reason = str(error).replace("\n", " ").rsplit("Error: ", 1)[-1].rsplit("failed: ", 1)[-1]
        reason = reason.rsplit(".cpp:", 1)[-1].lstrip("0123456789: ")
        raise SettingsError(
            f"factory: FAISS refuses {factory!r} for {dimension} dimensions and inner products "
            f"({reason.strip()[:160]}); use 'auto', 'Flat', 'HNSW32' or 'IVF256,Flat'"
        ) from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise SettingsError(
            f"factory: {factory!r} searches by another metric than the inner product that an "
            "index of unit vectors needs; use 'auto', 'Flat', 'HNSW32' or 'IVF256,Flat'"
        )
    return index


def check_training(factory: str, num_training: int) -> None:
    """Refuse more lists than there are training vectors, which FAISS can only fail on.

    Raises:
        SettingsError: too few training vectors.
    """
    nlist = nlist_of(factory)
    if nlist is not None and num_training < nlist:
        raise SettingsError(
            f"factory: {factory!r} has {nlist} lists, but only {num_training} vectors are there "
            f"to train them; use at most IVF{max(1, num_training // POINTS_PER_CENTROID)}, or "
            "'auto', and run the build again: what is embedded stays"
        )


def explain_given(factory: str, num_training: int, memory_bytes: int) -> str:
    """The explanation of an index that the settings named."""
    text = f"{factory}, as the settings say; it takes {_megabytes(memory_bytes)}."
    wanted = POINTS_PER_CENTROID * max(nlist_of(factory) or 0, 256 if "PQ" in factory else 0)
    if num_training < wanted:
        text += f" Its k-means had {num_training} vectors to learn from; {wanted} would be enough."
    return text


def _megabytes(num_bytes: int) -> str:
    value = num_bytes / MEBIBYTE
    return f"{value:,.1f} MB" if value < 10 else f"{value:,.0f} MB"
