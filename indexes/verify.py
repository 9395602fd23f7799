"""Whether the files of an index are what was written, and agree with one another."""

from pathlib import Path

import numpy as np

from ttt_adapt.errors import IndexFormatError
from ttt_adapt.indexes.faiss_index import read_faiss
from ttt_adapt.indexes.known_ids import KnownIds
from ttt_adapt.indexes.layout import (
    MANIFEST,
    VECTORS,
    Manifest,
    arrow_name,
    faiss_name,
    read_manifest,
    record_name,
    size_problems,
)
from ttt_adapt.indexes.passage_store import PassageStore, read_batches
from ttt_adapt.indexes.shards import NORM_TOLERANCE, hash_range, read_record, shard_problems
from ttt_adapt.storage import manifest_problems


def verify_index(folder: Path) -> list[str]:
    """What is wrong with an index, one line each; empty for a sound one.

    Every byte is read: sizes and SHA-256 of all files, row counts across files, unit vectors,
    unique passage ids, and FAISS' own count. FAISS' file is opened only if its hash is right.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except IndexFormatError as error:
        return [str(error)]
    problems = size_problems(folder, manifest)
    if problems:
        return problems
    others = {name: entry for name, entry in manifest.files.items() if name != VECTORS}
    problems = manifest_problems(folder, others, hashes=True)
    entry = manifest.files[VECTORS]
    if hash_range(folder / VECTORS, 0, int(entry["bytes"])) != entry["sha256"]:
        problems.append(f"{VECTORS}: SHA-256 differs from the manifest's")
    problems += _shard_problems(folder, manifest)
    if problems:
        return problems
    return _content_problems(folder, manifest) + _faiss_problems(folder, manifest)


def _shard_problems(folder: Path, manifest: Manifest) -> list[str]:
    problems = []
    first_row = 0
    for shard, num_rows in enumerate(manifest.shard_rows):
        record = read_record(folder, shard)
        if record is None:
            problems.append(f"{record_name(shard)}: cannot be read")
        elif record.num_passages != num_rows:
            problems.append(
                f"{record_name(shard)}: {record.num_passages} passages, {MANIFEST} says {num_rows}"
            )
        else:
            problems += shard_problems(folder, shard, record, first_row, manifest.dimension)
        first_row += num_rows
    return problems


def _content_problems(folder: Path, manifest: Manifest) -> list[str]:
    problems: list[str] = []
    store = PassageStore(folder, manifest)
    passage_ids, document_ids = KnownIds(), KnownIds()
    first_row = 0
    for shard, num_rows in enumerate(manifest.shard_rows):
        try:
            read_batches(folder / arrow_name(shard), num_rows)
        except IndexFormatError as error:
            return [*problems, str(error)]
        ids = store.column(shard, "id")
        repeated = passage_ids.add(ids)
        document_ids.add(store.column(shard, "document_id"))
        if repeated.any():
            twice = ids[int(np.argmax(repeated))]
            problems.append(f"{arrow_name(shard)}: passage id {twice!r} occurs twice")
        rows = np.asarray(store.vectors_ND[first_row : first_row + num_rows])
        norms = np.linalg.norm(rows, axis=1)
        unit = np.abs(norms - 1.0) <= NORM_TOLERANCE
        if not unit.all():
            row = int(np.argmin(unit))
            problems.append(f"{VECTORS}: row {first_row + row} has norm {norms[row]:.4g}, not 1")
        first_row += num_rows
    if len(document_ids) != manifest.num_documents:
        problems.append(
            f"{MANIFEST}: {manifest.num_documents} documents, the shards hold {len(document_ids)}"
        )
    return problems


def _faiss_problems(folder: Path, manifest: Manifest) -> list[str]:
    path = folder / faiss_name(manifest.generation)
    try:
        index = read_faiss(path, manifest.factory)
    except IndexFormatError as error:
        return [str(error)]
    if (index.ntotal, index.d) == (manifest.num_passages, manifest.dimension):
        return []
    found = f"{index.ntotal} vectors of {index.d} dimensions"
    expected = f"{manifest.num_passages} of {manifest.dimension}"
    return [f"{path.name}: {found}, {MANIFEST} says {expected}"]
