"""What people and other rooms may know about an index."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttt_adapt.indexes.layout import FORMAT_VERSION, TIMINGS, Manifest

OUTGROWN_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """Facts about an index; :meth:`to_json` gives them as JSON values.

    Attributes:
        num_passages: rows.
        num_documents: distinct document ids.
        dimension: D.
        factory: the FAISS factory string in use.
        nprobe: inverted lists a search visits at first; ``None`` where there are none.
        ef_search: HNSW's beam.
        explanation: why this factory, in a sentence or two.
        embedder_fingerprint: see :class:`ttt_adapt.types.Embedder`.
        embedder_description: one line for people.
        origin: corpus and chunk settings, as the builder was told.
        settings: the index settings it was built with.
        format_version: of the folder.
        content_hash: SHA-256 of everything a retrieval's result depends on.
        num_bytes: bytes on disk.
        num_shards: files the passages are in.
        num_additions: how often documents were added after the build.
        notes: advice, e.g. that the index has outgrown its factory.
        seconds: by stage of the last build or addition: ``read`` (the corpus), ``embed``,
            ``store``, ``train``, ``add``, ``write``; empty where unknown.
        num_resumed: passages that the last build found already embedded.
        num_skipped_documents: documents the last addition left out, their ids being present already.
        num_changed_documents: of these, how many have another text than the one present.
    """

    num_passages: int
    num_documents: int
    dimension: int
    factory: str
    nprobe: int | None
    ef_search: int
    explanation: str
    embedder_fingerprint: str
    embedder_description: str
    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    format_version: int
    content_hash: str
    num_bytes: int
    num_shards: int
    num_additions: int
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    num_resumed: int = 0
    num_skipped_documents: int = 0
    num_changed_documents: int = 0

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {**asdict(self), "notes": list(self.notes)}


def index_info(
    folder: Path,
    manifest: Manifest,
    *,
    num_resumed: int = 0,
    num_skipped_documents: int = 0,
    changed_documents: Sequence[str] = (),
) -> IndexInfo:
    """Facts about the finished index in ``folder``."""
    notes = []
    if changed_documents:
        notes.append(
            f"{len(changed_documents):,} of the documents left out have another text than the index "
            f"has under their id ({changed_documents[0]!r} the first): if they come from another "
            "corpus, add it again with an id_prefix; if they were edited, build the index anew"
        )
    if manifest.num_passages >= OUTGROWN_FACTOR * manifest.num_built_passages:
        notes.append(
            f"grown from {manifest.num_built_passages} to {manifest.num_passages} passages since "
            f"{manifest.factory} was chosen and trained; building it anew may search better"
        )
    return IndexInfo(
        num_passages=manifest.num_passages,
        num_documents=manifest.num_documents,
        dimension=manifest.dimension,
        factory=manifest.factory,
        nprobe=manifest.nprobe,
        ef_search=manifest.ef_search,
        explanation=manifest.explanation,
        embedder_fingerprint=manifest.embedder_fingerprint,
        embedder_description=manifest.embedder_description,
        origin=manifest.origin,
        settings=manifest.settings,
        format_version=FORMAT_VERSION,
        content_hash=manifest.content_hash,
        num_bytes=sum(int(entry["bytes"]) for entry in manifest.files.values()),
        num_shards=len(manifest.shard_rows),
        num_additions=manifest.generation,
        notes=tuple(notes),
        seconds=_read_timings(folder),
        num_resumed=num_resumed,
        num_skipped_documents=num_skipped_documents,
        num_changed_documents=len(changed_documents),
    )


def _read_timings(folder: Path) -> dict[str, float]:
    # Timings are a courtesy: an index whose timings are gone or mangled is a sound index.
    try:
        value = json.loads((folder / TIMINGS).read_text(encoding="utf-8"))
        return {str(stage): float(seconds) for stage, seconds in value.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
