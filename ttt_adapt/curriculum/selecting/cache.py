"""Vectors of texts on disk, found again by model and text.

    <folder>/<fingerprint, 16 digits>/embedder.json      what made them
                                      <hash>.npz         keys uint8 [n, 32], vectors float32 [n, D]

A shard is named by its texts and appears whole, so that several processes may write to one folder;
a damaged one counts as absent (zip files carry checksums) and is made again.

Shape legend: n texts of a shard, D width.
"""

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import FingerprintMismatchError
from ttt_adapt.storage import atomic_write, remove_orphans, sha256_bytes, write_json

FORMAT_VERSION = 1
_KEY_BYTES = 32
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def text_key(text: str) -> bytes:
    """What a text is found by: its SHA-256."""
    return hashlib.sha256(text.encode()).digest()


class EmbeddingCache:
    """Vectors of one embedder in a folder."""

    def __init__(self, folder: Path, *, fingerprint: str, dimension: int, description: str) -> None:
        """
        Args:
            folder: may hold other embedders' vectors too; made if it is not there.
            fingerprint: of the embedder.
            dimension: D.
            description: of the embedder, for people.

        Raises:
            FingerprintMismatchError: the folder's vectors are of another format or embedder.
        """
        self._folder = folder / fingerprint[:16]
        self._dimension = dimension
        manifest = self._folder / "embedder.json"
        expected = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "dimension": dimension,
        }
        if manifest.is_file():
            found = json.loads(manifest.read_text(encoding="utf-8"))
            if {key: found.get(key) for key in expected} != expected:
                raise FingerprintMismatchError(
                    f"{manifest}: expected vectors of embedder {fingerprint[:16]} ({dimension} "
                    f"wide, format {FORMAT_VERSION}), found others; choose another cache folder"
                )
            remove_orphans(self._folder)
        else:
            write_json(manifest, expected | {"description": description})
        self._place_of: dict[bytes, tuple[Path, int]] = {}
        for path in sorted(self._folder.glob("*.npz")):
            for row, key in enumerate(self._keys(path)):
                self._place_of.setdefault(key, (path, row))

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    def fill(self, keys: Sequence[bytes], out_nD: NDArray[np.float32]) -> list[int]:
        """Write known vectors into the rows of ``out_nD``; return the positions of unknown ones."""
        wanted: dict[Path, list[tuple[int, int]]] = {}
        missing = []
        for position, key in enumerate(keys):
            place = self._place_of.get(key)
            if place is None:
                missing.append(position)
            else:
                wanted.setdefault(place[0], []).append((position, place[1]))
        for path, pairs in wanted.items():
            positions, rows = zip(*pairs, strict=True)
            vectors = self._vectors(path)
            if vectors is None:
                self._forget(path)
                missing += positions
            else:
                out_nD[list(positions)] = vectors[list(rows)]
        return sorted(missing)

    def add(self, keys: Sequence[bytes], vectors_nD: NDArray[np.float32]) -> None:
        """Store vectors of texts."""
        if not keys:
            return
        path = self._folder / f"{sha256_bytes(b''.join(keys))[:32]}.npz"
        flat = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), _KEY_BYTES)
        with atomic_write(path) as stream:
            np.savez(stream, keys=flat, vectors=np.asarray(vectors_nD, dtype=np.float32))
        for row, key in enumerate(keys):
            self._place_of[key] = (path, row)

    def _keys(self, path: Path) -> list[bytes]:
        try:
            # Its own file: numpy leaves one that is no zip file open.
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as shard:
                keys = shard["keys"]
            if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != _KEY_BYTES:
                return []
        except _UNREADABLE:
            return []
        return [row.tobytes() for row in keys]

    def _vectors(self, path: Path) -> NDArray[np.float32] | None:
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as shard:
                vectors: NDArray[np.float32] = shard["vectors"]
                num = len(shard["keys"])
        except _UNREADABLE:
            return None
        sound = vectors.dtype == np.float32 and vectors.shape == (num, self._dimension)
        return vectors if sound else None

    def _forget(self, path: Path) -> None:
        self._place_of = {key: at for key, at in self._place_of.items() if at[0] != path}
