"""Training, filling, writing and reading a FAISS index so that the same input gives the same file."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import IndexFormatError, SettingsError
from ttt_adapt.indexes.factory import (
    POINTS_PER_CENTROID,
    depends_on_threads,
    fast_scan_table_bytes,
    nlist_of,
)
from ttt_adapt.storage import atomic_write

# FAISS subsamples beyond this: 256 points for each of an 8-bit quantiser's 256 centroids.
_MAX_POINTS_PER_CENTROID = 256
_QUANTIZER_TRAINING = 256 * _MAX_POINTS_PER_CENTROID
_OPQ_ROUNDS = 8
_OPQ_POINTS = 256 * POINTS_PER_CENTROID
_limit_lock = threading.Lock()


def num_training(factory: str, num_vectors: int, train_vectors: int) -> int:
    """How many vectors the index is trained on: no more than FAISS would use."""
    useful = max(_QUANTIZER_TRAINING, _MAX_POINTS_PER_CENTROID * (nlist_of(factory) or 0))
    return min(num_vectors, train_vectors, useful)


def training_sample(vectors_ND: NDArray[np.float32], num: int, seed: int) -> NDArray[np.float32]:
    """``num`` distinct rows, uniformly drawn, in ascending order; the only rows read."""
    num_vectors = len(vectors_ND)
    if num >= num_vectors:
        return np.array(vectors_ND)
    rows = np.random.default_rng(seed).choice(num_vectors, size=num, replace=False, shuffle=False)
    return np.array(vectors_ND[np.sort(rows)])


@contextlib.contextmanager
def reproducible_threads(factory: str) -> Iterator[None]:
    """One thread where more would change the file; FAISS' number is restored afterwards."""
    import faiss

    before = faiss.omp_get_max_threads()
    if depends_on_threads(factory):
        faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def train(index: Any, factory: str, sample_TD: NDArray[np.float32]) -> None:
    """Train ``index`` if it needs that.

    Raises:
        SettingsError: FAISS refuses, e.g. for too few vectors.
    """
    if index.is_trained:
        return
    with reproducible_threads(factory), _training_settings(index):
        try:
            index.train(sample_TD)
        except RuntimeError as error:
            reason = str(error).replace("\n", " ").rsplit("failed: ", 1)[-1]
            raise SettingsError(
                f"factory: FAISS cannot train {factory!r} on {len(sample_TD)} vectors "
                f"({reason[:160]}); use 'auto', and run the build again: what is embedded stays"
            ) from None


@contextlib.contextmanager
def _training_settings(index: Any) -> Iterator[None]:
    """A shorter search for OPQ's rotation, and no line printed for every k-means with few points.

    FAISS' 50 rounds over 65,536 vectors take one thread many minutes for 128 pieces. A rotation
    from fewer ranks a little worse, and the raw vectors put what was proposed in order anyway.
    About the points, :func:`ttt_adapt.indexes.factory.explain_given` says the same once.
    """
    faiss: Any = import_module("faiss")
    index = faiss.downcast_index(index)
    rotations = []
    if isinstance(index, faiss.IndexPreTransform):
        for position in range(index.chain.size()):
            transform = faiss.downcast_VectorTransform(index.chain.at(position))
            if isinstance(transform, faiss.OPQMatrix):
                transform.niter, transform.max_train_points = _OPQ_ROUNDS, _OPQ_POINTS
                # The quantiser that OPQ would make for itself, out of reach.
                quantizer = faiss.ProductQuantizer(transform.d_out, transform.M, 8)
                quantizer.cp.min_points_per_centroid = 1
                transform.pq = quantizer
                rotations.append((transform, quantizer))
    while hasattr(index, "index") or hasattr(index, "base_index"):
        inner = index.index if hasattr(index, "index") else index.base_index
        index = faiss.downcast_index(inner)
    if isinstance(index, faiss.IndexIVF):
        index.cp.min_points_per_centroid = 1
    if hasattr(index, "pq"):
        index.pq.cp.min_points_per_centroid = 1
    try:
        yield
    finally:
        for transform, _ in rotations:
            transform.pq = None


def add(
    index: Any,
    factory: str,
    vectors_ND: NDArray[np.float32],
    *,
    batch: int,
    on_advance: Callable[[int], None],
) -> None:
    """Add the rows that ``index`` lacks, in batches that begin where it ends.

    Batch boundaries are a function of the sizes alone: an HNSW graph depends on them.
    """
    import faiss

    with_ids = isinstance(faiss.downcast_index(index), (faiss.IndexIDMap, faiss.IndexIDMap2))
    with reproducible_threads(factory):
        for start in range(index.ntotal, len(vectors_ND), batch):
            rows = np.array(vectors_ND[start : start + batch])
            if with_ids:
                index.add_with_ids(rows, np.arange(start, start + len(rows), dtype=np.int64))
            else:
                index.add(rows)
            on_advance(len(rows))


def write_faiss(index: Any, path: Path) -> None:
    """Write ``index`` to ``path``: whole or not at all.

    Through Python's stream, because FAISS' own writer does not look whether closing succeeded.

    Raises:
        OSError: the disk is full, or the like; ``path`` is as it was.
    """
    faiss: Any = import_module("faiss")
    with atomic_write(path) as stream:
        writer = faiss.PyCallbackIOWriter(stream.write)
        faiss.write_index(index, writer)
        del writer


def read_faiss(path: Path, factory: str, *, writable: bool = False) -> Any:
    """Read an index that :func:`write_faiss` wrote; memory-mapped where FAISS can, unless writable.

    FAISS is told that nothing in the file is larger than the file (plus the tables that some kinds
    compute on reading), so that a damaged size cannot make it allocate more.

    Raises:
        IndexFormatError: missing, or nothing that FAISS can read.
    """
    import faiss

    if not path.is_file():
        raise IndexFormatError(
            f"{path}: missing; if documents were added to the index meanwhile, open it again"
        )
    # The tables of IVF-PQ speed up L2 only, and may exceed the file's size without any damage.
    flags = faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE | (0 if writable else faiss.IO_FLAG_MMAP_IFC)
    with _limit_lock:
        before = faiss.get_deserialization_vector_byte_limit()
        faiss.set_deserialization_vector_byte_limit(
            path.stat().st_size + fast_scan_table_bytes(factory)
        )
        try:
            return faiss.read_index(str(path), flags)
        except (RuntimeError, MemoryError) as error:
            reason = str(error).replace("\n", " ").rsplit("failed: ", 1)[-1][:160]
            raise IndexFormatError(
                f"{path}: FAISS cannot read it ({reason}); verify the index, or build it anew"
            ) from None
        finally:
            faiss.set_deserialization_vector_byte_limit(before)


def search_parameters(index: Any, *, nprobe: int | None, ef_search: int) -> Any:
    """FAISS search parameters for ``index``, through its wrappers; ``None`` where it has none."""
    # Under Any: the type stubs that come with FAISS lack these classes' keyword arguments.
    faiss: Any = import_module("faiss")
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = search_parameters(index.index, nprobe=nprobe, ef_search=ef_search)
        return inner and faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2)):
        return search_parameters(index.index, nprobe=nprobe, ef_search=ef_search)
    if isinstance(index, faiss.IndexRefine):
        inner = search_parameters(index.base_index, nprobe=nprobe, ef_search=ef_search)
        return inner and faiss.IndexRefineSearchParameters(
            k_factor=index.k_factor, base_index_params=inner
        )
    if isinstance(index, faiss.IndexIVF) and nprobe is not None:
        return faiss.SearchParametersIVF(nprobe=nprobe)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=ef_search)
    return None


def num_lists(index: Any) -> int | None:
    """Inverted lists of an index, through its wrappers; ``None`` without any."""
    import faiss

    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIVF):
        return int(index.nlist)
    for wrapper, attribute in (
        (faiss.IndexPreTransform, "index"),
        (faiss.IndexIDMap, "index"),
        (faiss.IndexIDMap2, "index"),
        (faiss.IndexRefine, "base_index"),
    ):
        if isinstance(index, wrapper):
            return num_lists(getattr(index, attribute))
    return None
