"""The files of an index, its manifest, and what opening one checks.

build.json            what a resumed build must match; written before the first shard
vectors.bin           float32 [N, D], row i is passage i; only ever grows
shards/00000.arrow    passages as an Arrow stream (``datasets.Dataset.from_file`` reads it)
shards/00000.json     what the shard holds, with hashes; written last, makes the shard count
faiss-0000.index      the FAISS index of generation 0 (an addition writes the next one)
manifest.json         written last, by rename: from then on the folder is an index
timings.json          seconds by stage; in no hash
.lock                 empty; held by the one writer
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.errors import IndexFormatError
from ttt_adapt.storage import manifest_problems, stable_hash, write_json

FORMAT = "ttt-adapt index"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
BUILD = "build.json"
VECTORS = "vectors.bin"
SHARDS = "shards"
TIMINGS = "timings.json"
LOCK = ".lock"
VECTOR_ITEM_BYTES = 4


def arrow_name(shard: int) -> str:
    """Passages of one shard, relative to the index folder."""
    return f"{SHARDS}/{shard:05d}.arrow"


def record_name(shard: int) -> str:
    """The record of one shard, relative to the index folder."""
    return f"{SHARDS}/{shard:05d}.json"


def faiss_name(generation: int) -> str:
    """The FAISS file of a generation: 0 is the build, every addition counts one up."""
    return f"faiss-{generation:04d}.index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a finished index but its contents.

    Attributes:
        num_built_passages: how many the build itself indexed; additions made the rest.
        num_built_shards: likewise.
        shard_rows: passages of each shard, in order.
        generation: how many additions there were.
        nprobe: ``None`` where the index has no inverted lists.
        files: size and SHA-256 by name; of ``vectors.bin``, of its first ``bytes`` bytes.
    """

    num_passages: int
    num_documents: int
    num_built_passages: int
    num_built_shards: int
    dimension: int
    shard_rows: tuple[int, ...]
    generation: int
    factory: str
    nprobe: int | None
    ef_search: int
    explanation: str
    embedder_fingerprint: str
    embedder_description: str
    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def content_hash(self) -> str:
        """SHA-256 of everything a retrieval's result depends on."""
        return stable_hash(
            {
                "format_version": FORMAT_VERSION,
                "embedder": self.embedder_fingerprint,
                "factory": self.factory,
                "nprobe": self.nprobe,
                "ef_search": self.ef_search,
                # Search walks rows and reads passages: how they were cut into files is no matter
                # of a result, but hashing what the files' own hashes say is cheap and safe.
                "files": {k: v["sha256"] for k, v in self.files.items() if k != BUILD},
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The manifest file's value, with a checksum over itself."""
        value = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        value["shard_rows"] = list(self.shard_rows)
        value["content_hash"] = self.content_hash
        return {**value, "checksum": stable_hash(value)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make ``folder`` an index, or a larger one, in one rename."""
    write_json(folder / MANIFEST, manifest.to_json())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished index, its checksum verified.

    Raises:
        IndexFormatError: no folder, no finished index in it, another format, a newer version, or
            a damaged manifest.
    """
    if not folder.is_dir():
        raise IndexFormatError(f"{folder}: no such folder; build an index there first")
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / BUILD).is_file():
            raise IndexFormatError(
                f"{folder}: the index is unfinished: run the build again to continue it"
            )
        raise IndexFormatError(f"{folder}: no index here ({MANIFEST} is missing); build one first")
    damaged = IndexFormatError(
        f"{path}: damaged (not the manifest that was written); restore it or build the index anew"
    )
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise IndexFormatError(f"{path}: expected {FORMAT!r}, found {value['format']!r:.60}")
        if value["format_version"] > FORMAT_VERSION:
            raise IndexFormatError(
                f"{path}: format version {value['format_version']} is newer than {FORMAT_VERSION}, "
                "the newest this ttt-adapt reads; upgrade ttt-adapt"
            )
        checksum = value.pop("checksum")
        if checksum != stable_hash(value):
            raise damaged
        for key in ("format", "format_version", "content_hash"):
            value.pop(key)
        manifest = Manifest(**{**value, "shard_rows": tuple(value["shard_rows"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise (error if isinstance(error, IndexFormatError) else damaged) from None
    # A flipped bit in layout characters can leave the value, and so its checksum, as it was.
    if text != json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n":
        raise damaged
    return manifest


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Missing files, files of another size, and sizes that contradict the manifest's counts."""
    others = {name: entry for name, entry in manifest.files.items() if name != VECTORS}
    problems = manifest_problems(folder, others, hashes=False)
    vectors = folder / VECTORS
    expected = manifest.num_passages * manifest.dimension * VECTOR_ITEM_BYTES
    if not vectors.is_file():
        problems.append(f"{VECTORS}: missing")
    # Rows beyond the manifest's are an addition under way, or one that was interrupted.
    elif vectors.stat().st_size < expected:
        problems.append(f"{VECTORS}: {vectors.stat().st_size} bytes, expected {expected}")
    if sum(manifest.shard_rows) != manifest.num_passages:
        problems.append(
            f"{MANIFEST}: shards hold {sum(manifest.shard_rows)} passages, "
            f"the index {manifest.num_passages}"
        )
    return problems


def open_manifest(folder: Path) -> Manifest:
    """:func:`read_manifest`, with the sizes of all files checked.

    Raises:
        IndexFormatError: see there; or a file is missing or truncated.
    """
    manifest = read_manifest(folder)
    problems = size_problems(folder, manifest)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise IndexFormatError(
            f"{folder}: damaged index: {problems[0]}{more}; restore it or build it anew"
        )
    return manifest
