"""Building an index: resumable at every shard, an index only once its manifest is there."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import (
    CorpusError,
    FingerprintMismatchError,
    IndexFormatError,
    SettingsError,
)
from ttt_adapt.indexes.factory import new_index
from ttt_adapt.indexes.info import IndexInfo, index_info
from ttt_adapt.indexes.layout import (
    BUILD,
    LOCK,
    MANIFEST,
    TIMINGS,
    Manifest,
    open_manifest,
    write_manifest,
)
from ttt_adapt.indexes.lock import exclusive
from ttt_adapt.indexes.progress import BuildProgress, StageClock
from ttt_adapt.indexes.shards import cut_shards, passages_sha256, read_record
from ttt_adapt.indexes.stages import (
    Embedded,
    build_record,
    content_files,
    drop_leftovers,
    embed_shards,
    index_vectors,
    map_vectors,
)
from ttt_adapt.storage import write_json
from ttt_adapt.types import Embedder, Passage


def build_index(
    passages: Iterable[Passage],
    embedder: Embedder,
    folder: Path,
    settings: IndexSettings,
    *,
    origin: Mapping[str, Any],
    progress: BuildProgress | None = None,
) -> IndexInfo:
    """Build an index in ``folder``, or continue one that was interrupted there.

    Passages are read once, in bounded memory: ``settings.shard_passages`` at a time. Killed at any
    moment and called again with the same arguments, it continues after the last finished shard,
    and the finished files equal those of an uninterrupted build byte for byte (``timings.json``
    aside). For a finished index it checks that the passages are the same and changes nothing.

    Args:
        passages: in the same order every time.
        origin: where passages come from (corpus and chunk settings) as JSON values.

    Raises:
        CorpusError: no passages, or an id that occurs twice.
        SettingsError: the factory is unknown, or cannot be trained on so few vectors.
        FingerprintMismatchError: ``folder`` holds another build, finished or not: of another
            embedder, origin, settings or other passages.
        IndexFormatError: ``folder`` holds something else, or a damaged index.
        BusyError: another process is writing ``folder``.
        OSError: the disk is full, or the like; what is finished stays.
    """
    folder = Path(folder)
    progress = progress or BuildProgress()
    if settings.factory != "auto":
        new_index(settings.factory, embedder.dimension)
    record = build_record(embedder, origin, settings)
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        if (folder / MANIFEST).exists():
            return _already_built(folder, passages, record)
        _require_same_build(folder, record)
        return _build(folder, passages, embedder, settings, record, progress)


def _build(
    folder: Path,
    passages: Iterable[Passage],
    embedder: Embedder,
    settings: IndexSettings,
    record: Mapping[str, Any],
    progress: BuildProgress,
) -> IndexInfo:
    clock = StageClock()
    embedded = embed_shards(
        folder,
        passages,
        embedder,
        settings,
        first_shard=0,
        first_row=0,
        strict=True,
        progress=progress,
        clock=clock,
        before_first=lambda: write_json(folder / BUILD, record),
    )
    num_rows, num_shards = sum(embedded.shard_rows), len(embedded.shard_rows)
    _require_all_shards(folder, embedded)
    if not num_rows:
        raise CorpusError(
            "no passages to index: the corpus is empty, or all of its documents were left out"
        )
    drop_leftovers(folder, num_shards, num_rows, embedder.dimension)
    vectors_ND = map_vectors(folder, num_rows, embedder.dimension)
    try:
        indexed = index_vectors(folder, vectors_ND, settings, progress=progress, clock=clock)
    except SettingsError:
        # Only now is it known that the factory does not suit. The vectors are not to blame:
        # the next build here may name another one.
        write_json(folder / BUILD, {**record, "factory_refused": True})
        raise
    with clock.measure("write"):
        files = content_files(folder, num_shards, num_rows, embedder.dimension, 0, known={})
    manifest = Manifest(
        num_passages=num_rows,
        num_documents=embedded.num_documents,
        num_built_passages=num_rows,
        num_built_shards=num_shards,
        dimension=embedder.dimension,
        shard_rows=tuple(embedded.shard_rows),
        generation=0,
        factory=indexed.factory,
        nprobe=indexed.nprobe,
        ef_search=settings.ef_search,
        explanation=indexed.explanation,
        embedder_fingerprint=embedder.fingerprint,
        embedder_description=embedder.description,
        origin=record["origin"],
        settings=record["settings"],
        files=files,
    )
    write_json(folder / TIMINGS, clock.seconds)
    write_manifest(folder, manifest)
    return index_info(folder, manifest, num_resumed=embedded.num_resumed)


def _refuse_foreign(folder: Path) -> None:
    if folder.is_file():
        raise IndexFormatError(f"{folder}: expected a folder for the index, found a file")
    if not folder.is_dir() or (folder / BUILD).is_file() or (folder / MANIFEST).is_file():
        return
    foreign = [p.name for p in folder.iterdir() if not p.name.startswith((LOCK, BUILD))]
    if foreign:
        raise IndexFormatError(
            f"{folder}: holds files that are no index ({min(foreign)}, …); "
            "choose an empty or a new folder"
        )


def _require_same_build(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse to continue a build that something else began."""
    path = folder / BUILD
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found_settings = dict(found["settings"])
    except (ValueError, KeyError, TypeError):
        raise IndexFormatError(f"{path}: damaged; remove the folder to build anew") from None
    wanted = dict(record)
    if found.pop("factory_refused", False):
        wanted["settings"] = {**wanted["settings"], "factory": found_settings.get("factory")}
    _require_equal(folder, found, wanted, state="an unfinished")


def _require_equal(
    folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, state: str
) -> None:
    differences = list(_differences(found, wanted, ""))
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise FingerprintMismatchError(
            f"{folder}: holds {state} index of another build: {differences[0]}{more}; "
            "remove the folder to build anew, or choose another one"
        )


def _differences(found: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            inner = f"{path}.{key}" if path else key
            yield from _differences(found.get(key), wanted.get(key), inner)
    elif found != wanted:
        yield f"{path} was {_short(found)}, is now {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _require_all_shards(folder: Path, embedded: Embedded) -> None:
    """A corpus that ends before the shards already finished is another corpus."""
    extra = read_record(folder, len(embedded.shard_rows))
    if extra is not None:
        raise FingerprintMismatchError(
            f"{folder}: the corpus is not the one this index was begun with: it now ends after "
            f"{sum(embedded.shard_rows)} passages, and {extra.first_id!r} should follow; "
            "restore the corpus, or remove the folder to build anew"
        )


def _already_built(
    folder: Path, passages: Iterable[Passage], record: Mapping[str, Any]
) -> IndexInfo:
    """Confirm that the finished index is what this build would give; change nothing."""
    manifest = open_manifest(folder)
    found = {
        "origin": manifest.origin,
        "embedder": {
            "fingerprint": manifest.embedder_fingerprint,
            "description": manifest.embedder_description,
            "dimension": manifest.dimension,
        },
        "settings": manifest.settings,
    }
    _require_equal(folder, found, record, state="a finished")
    rows = 0
    shards = cut_shards(passages, int(manifest.settings["shard_passages"]))
    for shard, batch in enumerate(shards):
        kept = read_record(folder, shard) if shard < manifest.num_built_shards else None
        if kept is None or kept.passages_sha256 != passages_sha256(batch):
            raise _changed(folder, f"from passage {batch[0].id!r} on it differs")
        rows += len(batch)
    if rows != manifest.num_built_passages:
        raise _changed(folder, f"it has {rows} passages, not {manifest.num_built_passages}")
    return index_info(folder, manifest, num_resumed=manifest.num_built_passages)


def _changed(folder: Path, difference: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(
        f"{folder}: the corpus has changed since this index was built ({difference}); "
        "remove the folder to build anew, or add the new documents to the index"
    )
