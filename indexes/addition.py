"""Adding documents to a finished index, which stays valid until the larger one replaces it."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from ttt_adapt.config import IndexSettings, make_settings
from ttt_adapt.indexes.faiss_index import add, read_faiss, write_faiss
from ttt_adapt.indexes.index import require_fingerprint
from ttt_adapt.indexes.info import IndexInfo, index_info
from ttt_adapt.indexes.known_ids import KnownIds
from ttt_adapt.indexes.layout import (
    TIMINGS,
    VECTORS,
    Manifest,
    faiss_name,
    open_manifest,
    write_manifest,
)
from ttt_adapt.indexes.lock import exclusive
from ttt_adapt.indexes.passage_store import PassageStore
from ttt_adapt.indexes.progress import BuildProgress, StageClock
from ttt_adapt.indexes.stages import content_files, drop_leftovers, embed_shards, map_vectors
from ttt_adapt.storage import write_json
from ttt_adapt.types import Embedder, Passage


def add_to_index(
    folder: Path,
    passages: Iterable[Passage],
    embedder: Embedder,
    *,
    progress: BuildProgress | None = None,
) -> IndexInfo:
    """Append the documents whose ids the index does not have; the others are skipped and counted,
    and those of them whose text is not the index's.

    New passages become new shards after the old ones; the FAISS index is read, extended with the
    quantisers it was trained with, and written beside the old one; one rename of the manifest
    switches. Killed before that, the index is the old one; called again with the same passages,
    shards that were finished are not embedded again. Readers that opened the index before keep
    the old one.

    Raises:
        CorpusError: a passage id occurs twice among the new ones.
        FingerprintMismatchError: the index was built with another embedder.
        IndexFormatError: no finished index there, or a damaged one.
        BusyError: another process is writing it.
        OSError: the disk is full, or the like; the index is the old one.
    """
    folder = Path(folder)
    progress = progress or BuildProgress()
    require_fingerprint(open_manifest(folder), embedder)
    with exclusive(folder):
        manifest = open_manifest(folder)
        require_fingerprint(manifest, embedder)
        settings = make_settings(IndexSettings, dict(manifest.settings), where=str(folder))
        clock = StageClock()
        new = _NewDocuments(passages, folder, manifest)
        embedded = embed_shards(
            folder,
            new,
            embedder,
            settings,
            first_shard=len(manifest.shard_rows),
            first_row=manifest.num_passages,
            strict=False,
            progress=progress,
            clock=clock,
            before_first=lambda: None,
        )
        shard_rows = (*manifest.shard_rows, *embedded.shard_rows)
        num_rows = sum(shard_rows)
        drop_leftovers(folder, len(shard_rows), num_rows, manifest.dimension)
        if embedded.shard_rows:
            manifest = _extend(
                folder, manifest, shard_rows, embedded.num_documents, settings, progress, clock
            )
        return index_info(
            folder,
            manifest,
            num_resumed=embedded.num_resumed,
            num_skipped_documents=len(new.skipped),
            changed_documents=new.changed(),
        )


def _extend(
    folder: Path,
    manifest: Manifest,
    shard_rows: tuple[int, ...],
    num_documents: int,
    settings: IndexSettings,
    progress: BuildProgress,
    clock: StageClock,
) -> Manifest:
    """Write the next generation's FAISS index and switch to it."""
    num_rows = sum(shard_rows)
    old_faiss = folder / faiss_name(manifest.generation)
    generation = manifest.generation + 1
    index = read_faiss(old_faiss, manifest.factory, writable=True)
    progress.on_stage("add", num_rows - manifest.num_passages)
    with clock.measure("add"):
        add(
            index,
            manifest.factory,
            map_vectors(folder, num_rows, manifest.dimension),
            batch=settings.add_batch,
            on_advance=progress.on_advance,
        )
    progress.on_stage("write", None)
    with clock.measure("write"):
        write_faiss(index, folder / faiss_name(generation))
        known = {
            name: entry
            for name, entry in manifest.files.items()
            if name not in (VECTORS, old_faiss.name)
        }
        files = content_files(
            folder, len(shard_rows), num_rows, manifest.dimension, generation, known=known
        )
    extended = replace(
        manifest,
        num_passages=num_rows,
        num_documents=manifest.num_documents + num_documents,
        shard_rows=shard_rows,
        generation=generation,
        files=files,
    )
    write_json(folder / TIMINGS, clock.seconds)
    write_manifest(folder, extended)
    old_faiss.unlink()
    return extended


class _NewDocuments:
    """Passages of documents that an index does not hold; digests of the others are kept."""

    def __init__(self, passages: Iterable[Passage], folder: Path, manifest: Manifest) -> None:
        self.skipped: dict[str, bytes] = {}
        self._passages = passages
        self._present = KnownIds()
        self._store = PassageStore(folder, manifest)
        self._shards = range(len(manifest.shard_rows))
        for shard in self._shards:
            self._present.add(self._store.column(shard, "document_id"))

    def __iter__(self) -> Iterator[Passage]:
        for document_id, passages in groupby(self._passages, key=lambda p: p.document_id):
            if self._present.contains([document_id])[0]:
                self.skipped[document_id] = _digest(passage.text for passage in passages)
            else:
                yield from passages

    def changed(self) -> list[str]:
        """The skipped documents whose text in the index is another one; reads their shards' text."""
        changed = []
        for document_id, rows in groupby(self._stored(), key=lambda row: row[0]):
            digest = self.skipped.get(document_id)
            if digest is not None and digest != _digest(text for _, text in rows):
                changed.append(document_id)
        return changed

    def _stored(self) -> Iterator[tuple[str, str]]:
        for shard in self._shards if self.skipped else ():
            ids = self._store.column(shard, "document_id")
            if not self.skipped.keys().isdisjoint(ids):
                yield from zip(ids, self._store.column(shard, "text"), strict=True)


def _digest(texts: Iterable[str]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        raw = text.encode()
        # A text's length, or else where it ended would not be told.
        found.update(len(raw).to_bytes(8, "little"))
        found.update(raw)
    return found.digest()
