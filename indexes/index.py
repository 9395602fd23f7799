"""An opened index: candidates with their raw vectors, never a padding id.

Shape legend: N passages, K candidates, M query rows, D embedding width.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import FingerprintMismatchError, IndexFormatError, SelectionError
from ttt_adapt.indexes.factory import stores_raw_vectors
from ttt_adapt.indexes.faiss_index import num_lists, read_faiss, search_parameters
from ttt_adapt.indexes.info import IndexInfo, index_info
from ttt_adapt.indexes.layout import Manifest, faiss_name, open_manifest
from ttt_adapt.indexes.passage_store import PassageStore
from ttt_adapt.indexes.search import Reject, Verdicts, exact_scores, first_size, search_row
from ttt_adapt.types import Embedder, IntArray, Neighbors, Passage


class Index:
    """A finished index, read-only; any number of processes may open it. Use :meth:`open`.

    Attributes:
        folder: where it is.
        info: facts about it.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.info: IndexInfo = index_info(folder, manifest)
        self._manifest = manifest
        self._store = PassageStore(folder, manifest)
        self._loaded: Any = None
        self._loading = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "Index":
        """Open the index in ``folder``; manifest and the sizes of all files are checked at once.

        FAISS' file is read at the first search.

        Raises:
            IndexFormatError: missing, unfinished, of a newer format, or damaged.
        """
        folder = Path(folder)
        return cls(folder, open_manifest(folder))

    def __len__(self) -> int:
        return self.info.num_passages

    def require_embedder(self, embedder: Embedder) -> None:
        """Check that ``embedder`` makes the vectors this index holds.

        Raises:
            FingerprintMismatchError: it does not.
        """
        require_fingerprint(self._manifest, embedder)

    def search(
        self,
        queries_MD: NDArray[Any],
        *,
        num_candidates: int,
        reject: Reject | None = None,
    ) -> Neighbors:
        """The ``num_candidates`` most similar accepted passages of each query row, united.

        FAISS proposes; scores and order are those of the raw vectors. An index with fewer accepted
        passages gives fewer.

        Args:
            queries_MD: unit vectors, floating, ``[M, D]``, M ≥ 1.
            num_candidates: K per row; the union has at most M·K.
            reject: returns ``""`` to accept a passage, ``"own"`` or ``"overlap"`` to leave it out.
                Asked once for each passage that would otherwise be handed out.

        Raises:
            SelectionError: queries of another shape, type or dimension, or not finite;
                ``num_candidates`` below 1.
            IndexFormatError: FAISS' file is damaged.
        """
        queries = self._check_queries(queries_MD)
        if num_candidates < 1:
            raise SelectionError(f"num_candidates must be at least 1, found {num_candidates}")
        raw = stores_raw_vectors(self.info.factory)
        nlist = num_lists(self._faiss())
        size = first_size(num_candidates, len(self), raw=raw)
        proposals = self._propose(queries, size, self.info.nprobe)
        verdicts = Verdicts(self._store, reject)
        united: set[int] = set()
        rejected: dict[int, str] = {}
        for row, query in enumerate(queries):
            accepted = search_row(
                query,
                proposals[row],
                lambda size, nprobe, q=query: self._propose(q[None], size, nprobe)[0],  # type: ignore[misc]
                self._store,
                verdicts,
                num_candidates=num_candidates,
                nprobe=self.info.nprobe,
                nlist=nlist,
                raw=raw,
            )
            united.update(accepted.ids)
            rejected.update(accepted.rejected)
        ids = np.array(sorted(united), dtype=np.int64)
        vectors = self.vectors(ids)
        scores = np.full(len(ids), -np.inf, dtype=np.float32)
        for query in queries:
            np.maximum(scores, exact_scores(vectors, query), out=scores)
        order = np.lexsort((ids, -scores))
        return Neighbors(
            ids=ids[order],
            scores=scores[order],
            vectors=vectors[order],
            num_excluded_own=sum(reason == "own" for reason in rejected.values()),
            num_excluded_overlap=sum(reason == "overlap" for reason in rejected.values()),
        )

    def sample(self, num: int, seed: int, *, reject: Reject | None = None) -> Neighbors:
        """``num`` accepted passages drawn uniformly without replacement, in order of drawing.

        There is no query, so all scores are 0. Fewer where the index is exhausted. Excluded
        passages are those that were drawn and rejected.

        Raises:
            SelectionError: ``num`` below 1.
        """
        if num < 1:
            raise SelectionError(f"a sample needs at least 1 passage, found {num}")
        verdicts = Verdicts(self._store, reject)
        drawn: list[int] = []
        for row in _random_order(len(self), seed):
            if all(not reason for _, reason in verdicts.of([row])):
                drawn.append(row)
                if len(drawn) == num:
                    break
        ids = np.array(drawn, dtype=np.int64)
        reasons = list(verdicts.reasons.values())
        return Neighbors(
            ids=ids,
            scores=np.zeros(len(ids), dtype=np.float32),
            vectors=self.vectors(ids),
            num_excluded_own=reasons.count("own"),
            num_excluded_overlap=reasons.count("overlap"),
        )

    def passages(self, ids: Sequence[int] | IntArray) -> list[Passage]:
        """The passages of these rows, in this order.

        Raises:
            SelectionError: an id outside ``[0, N)``.
        """
        return self._store.passages(self._check_ids(ids))

    def vectors(self, ids: Sequence[int] | IntArray) -> NDArray[np.float32]:
        """Raw vectors of these rows, float32 ``[len(ids), D]``, copied out of the memory map.

        Raises:
            SelectionError: an id outside ``[0, N)``.
        """
        return np.array(self._store.vectors_ND[self._check_ids(ids)])

    def all_vectors(self) -> NDArray[np.float32]:
        """Every raw vector, float32 ``[N, D]``: a read-only memory map."""
        return self._store.vectors_ND

    def dataset(self) -> Any:
        """The passages as a memory-mapped ``datasets.Dataset``; row i is passage i."""
        return self._store.dataset()

    def _faiss(self) -> Any:
        with self._loading:
            if self._loaded is None:
                path = self.folder / faiss_name(self._manifest.generation)
                index = read_faiss(path, self._manifest.factory)
                if (index.ntotal, index.d) != (len(self), self.info.dimension):
                    raise IndexFormatError(
                        f"{path}: expected {len(self)} vectors of {self.info.dimension} "
                        f"dimensions, found {index.ntotal} of {index.d}; build the index anew"
                    )
                self._loaded = index
            return self._loaded

    def _propose(self, queries_MD: NDArray[np.float32], size: int, nprobe: int | None) -> IntArray:
        index = self._faiss()
        parameters = search_parameters(index, nprobe=nprobe, ef_search=self.info.ef_search)
        _, ids = index.search(queries_MD, size, params=parameters)
        if ids.max(initial=-1) >= len(self):
            raise IndexFormatError(
                f"{self.folder}: FAISS names passage {ids.max()} of {len(self)}; "
                "the index is damaged: verify it, or build it anew"
            )
        return np.asarray(ids, dtype=np.int64)

    def _check_queries(self, queries_MD: NDArray[Any]) -> NDArray[np.float32]:
        queries = np.asarray(queries_MD)
        if queries.ndim != 2 or not len(queries):
            raise SelectionError(
                f"queries must be an array [M, {self.info.dimension}] with M ≥ 1, "
                f"found shape {queries.shape}"
            )
        if queries.shape[1] != self.info.dimension:
            raise SelectionError(
                f"queries have dimension {queries.shape[1]}, the index {self.info.dimension}; "
                f"embed them with {self.info.embedder_description}"
            )
        if not np.issubdtype(queries.dtype, np.floating):
            raise SelectionError(f"queries must be floating point, found {queries.dtype}")
        if not np.isfinite(queries).all():
            row = int(np.argmin(np.isfinite(queries).all(axis=1)))
            raise SelectionError(f"queries must be finite, found NaN or infinity in row {row}")
        return np.ascontiguousarray(queries, dtype=np.float32)

    def _check_ids(self, ids: Sequence[int] | IntArray) -> IntArray:
        rows = np.asarray(ids, dtype=np.int64).reshape(-1)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            wrong = rows[(rows < 0) | (rows >= len(self))][0]
            raise SelectionError(f"passage {wrong} is not among the index's 0 to {len(self) - 1}")
        return rows


def require_fingerprint(manifest: Manifest, embedder: Embedder) -> None:
    """Refuse an embedder that did not make the vectors of an index.

    Raises:
        FingerprintMismatchError: naming both.
    """
    if embedder.dimension != manifest.dimension:
        raise FingerprintMismatchError(
            f"the index holds vectors of dimension {manifest.dimension} "
            f"({manifest.embedder_description}), the embedder makes {embedder.dimension} "
            f"({embedder.description}); use the index's embedder, or build another index"
        )
    if embedder.fingerprint != manifest.embedder_fingerprint:
        raise FingerprintMismatchError(
            f"the index was built with {manifest.embedder_description} "
            f"[{manifest.embedder_fingerprint[:12]}], the embedder is {embedder.description} "
            f"[{embedder.fingerprint[:12]}]; use the index's embedder, or build another index"
        )


def _random_order(num_passages: int, seed: int) -> Iterator[int]:
    """0 … N−1 in uniformly random order, in memory proportional to how many are taken."""
    generator = np.random.default_rng(seed)
    taken: set[int] = set()
    while 2 * len(taken) < num_passages:
        row = int(generator.integers(num_passages))
        if row not in taken:
            taken.add(row)
            yield row
    rest = np.setdiff1d(np.arange(num_passages), np.fromiter(taken, dtype=np.int64))
    yield from generator.permutation(rest).tolist()
