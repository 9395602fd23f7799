"""The stages that building and adding share: passages to shards, vectors to FAISS, manifest."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import CorpusError, SettingsError
from ttt_adapt.indexes.factory import (
    check_training,
    choose_factory,
    default_nprobe,
    explain_given,
    new_index,
    nlist_of,
)
from ttt_adapt.indexes.faiss_index import add, num_training, train, training_sample, write_faiss
from ttt_adapt.indexes.known_ids import KnownIds
from ttt_adapt.indexes.layout import (
    BUILD,
    SHARDS,
    VECTOR_ITEM_BYTES,
    VECTORS,
    arrow_name,
    faiss_name,
    record_name,
)
from ttt_adapt.indexes.progress import BuildProgress, StageClock
from ttt_adapt.indexes.shards import (
    cut_shards,
    embed_passages,
    hash_range,
    passages_sha256,
    read_record,
    reusable,
    write_shard,
)
from ttt_adapt.storage import file_manifest, sync_file
from ttt_adapt.types import Embedder, Passage


@dataclass(slots=True)
class Embedded:
    """What the embedding stage left on disk.

    Attributes:
        shard_rows: passages of each new shard.
        num_documents: distinct documents among them.
        num_resumed: passages whose vectors an earlier attempt had written.
    """

    shard_rows: list[int]
    num_documents: int = 0
    num_resumed: int = 0


def embed_shards(
    folder: Path,
    passages: Iterable[Passage],
    embedder: Embedder,
    settings: IndexSettings,
    *,
    first_shard: int,
    first_row: int,
    strict: bool,
    progress: BuildProgress,
    clock: StageClock,
    before_first: Callable[[], None],
) -> Embedded:
    """Write shards from ``first_shard`` on, reusing those an earlier attempt finished.

    Args:
        strict: a finished shard with other passages is an error rather than replaced.
        before_first: called once, when it is certain that there is a passage.

    Raises:
        CorpusError: a passage id occurs twice.
        FingerprintMismatchError: see ``strict``.
        IndexFormatError: the embedder breaks its promises.
    """
    progress.on_stage("embed", None)
    passage_ids, document_ids = KnownIds(), KnownIds()
    done = Embedded([])
    row, shard = first_row, first_shard
    shards = iter(cut_shards(passages, settings.shard_passages))
    while True:
        with clock.measure("read"):
            batch = next(shards, None)
        if batch is None:
            break
        if shard == first_shard:
            before_first()
        repeated = passage_ids.add([passage.id for passage in batch])
        if repeated.any():
            twice = batch[int(np.argmax(repeated))]
            raise CorpusError(
                f"passage id {twice.id!r} occurs twice (again in {twice.source or 'no source'}); "
                "document ids must differ: choose another id column, or let them be derived"
            )
        done.num_documents += int((~document_ids.add([p.document_id for p in batch])).sum())
        with clock.measure("store"):
            digest = passages_sha256(batch)
            found = reusable(folder, shard, row, embedder.dimension, batch, digest, strict=strict)
        if found is not None:
            done.num_resumed += len(batch)
            progress.on_resumed(len(batch))
        else:
            with clock.measure("embed"):
                vectors_ND = embed_passages(batch, embedder, on_advance=progress.on_advance)
            with clock.measure("store"):
                write_shard(folder, shard, row, batch, digest, vectors_ND)
        done.shard_rows.append(len(batch))
        row += len(batch)
        shard += 1
    return done


def drop_leftovers(folder: Path, num_shards: int, num_rows: int, dimension: int) -> None:
    """Remove rows and shards beyond the given number: of an interrupted, different addition."""
    vectors = folder / VECTORS
    size = num_rows * dimension * VECTOR_ITEM_BYTES
    if vectors.is_file() and vectors.stat().st_size > size:
        os.truncate(vectors, size)
        sync_file(vectors)
    for path in (folder / SHARDS).glob("*"):
        if path.stem.isdigit() and int(path.stem) >= num_shards:
            path.unlink()


def map_vectors(folder: Path, num_rows: int, dimension: int) -> NDArray[np.float32]:
    """The raw vectors, memory-mapped, read-only: float32 ``[num_rows, dimension]``."""
    shape = (num_rows, dimension)
    return np.memmap(folder / VECTORS, dtype="<f4", mode="r", shape=shape)


@dataclass(frozen=True, slots=True)
class Indexed:
    """The FAISS part of a manifest."""

    factory: str
    nprobe: int | None
    explanation: str


def index_vectors(
    folder: Path,
    vectors_ND: NDArray[np.float32],
    settings: IndexSettings,
    *,
    progress: BuildProgress,
    clock: StageClock,
) -> Indexed:
    """Choose, train, fill and write generation 0 of the FAISS index.

    Raises:
        SettingsError: the factory cannot be trained on these vectors.
        OSError: it cannot be written; nothing appears in its place.
    """
    num_vectors, dimension = vectors_ND.shape
    explanation = ""
    if settings.factory == "auto":
        choice = choose_factory(
            num_vectors,
            dimension,
            settings.memory_budget_mb,
            train_vectors=settings.train_vectors,
        )
        factory, nprobe, explanation = choice.factory, choice.nprobe, choice.explanation
    else:
        factory = settings.factory
        nprobe = default_nprobe(nlist_of(factory))
    if nprobe is not None and settings.nprobe is not None:
        nprobe = min(settings.nprobe, nlist_of(factory) or settings.nprobe)
    index = new_index(factory, dimension)
    num = num_training(factory, num_vectors, settings.train_vectors)
    if not index.is_trained:
        check_training(factory, num)
        progress.on_stage("train", num)
        with clock.measure("train"):
            train(index, factory, training_sample(vectors_ND, num, settings.seed))
    progress.on_stage("add", num_vectors)
    with clock.measure("add"):
        add(
            index,
            factory,
            vectors_ND,
            batch=settings.add_batch,
            on_advance=progress.on_advance,
        )
    progress.on_stage("write", None)
    path = folder / faiss_name(0)
    with clock.measure("write"):
        write_faiss(index, path)
    explanation = explanation or explain_given(factory, num, path.stat().st_size)
    return Indexed(factory, nprobe, explanation)


def content_files(
    folder: Path,
    num_shards: int,
    num_rows: int,
    dimension: int,
    generation: int,
    *,
    known: Mapping[str, Mapping[str, Any]],
) -> dict[str, Mapping[str, Any]]:
    """Sizes and hashes for the manifest.

    Args:
        known: entries of files that cannot have changed; they are not read again.
    """
    names = [BUILD]
    files: dict[str, Mapping[str, Any]] = {}
    for shard in range(num_shards):
        record = read_record(folder, shard)
        assert record is not None, "every shard was written or found sound a moment ago"
        entry = {"bytes": record.arrow_bytes, "sha256": record.arrow_sha256}
        files[arrow_name(shard)] = entry
        names.append(record_name(shard))
    names = [name for name in names if name not in known] + [faiss_name(generation)]
    files |= {**known, **file_manifest(folder, names)}
    num_bytes = num_rows * dimension * VECTOR_ITEM_BYTES
    files[VECTORS] = {"bytes": num_bytes, "sha256": hash_range(folder / VECTORS, 0, num_bytes)}
    return dict(sorted(files.items()))


def build_record(
    embedder: Embedder, origin: Mapping[str, Any], settings: IndexSettings
) -> dict[str, Any]:
    """What must be equal for a build to continue another: the value of ``build.json``."""
    try:
        plain_origin = json.loads(json.dumps(origin, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"origin: expected JSON values, found something else: {error}"
        ) from None
    return {
        "origin": plain_origin,
        "embedder": {
            "fingerprint": embedder.fingerprint,
            "description": embedder.description,
            "dimension": embedder.dimension,
        },
        "settings": settings.model_dump(mode="json"),
    }
