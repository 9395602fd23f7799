"""Files that are either whole or not there: temporary sibling, fsync, rename; manifests with hashes."""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

TEMPORARY_MARK = ".partial-"


def sha256_bytes(data: bytes) -> str:
    """Hexadecimal SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in bounded memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stable_hash(value: Any) -> str:
    """SHA-256 of a JSON value: equal for equal values, whatever the order of keys."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file that another library wrote to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """A name beside ``path`` that no finished file ever has; see :func:`remove_orphans`."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{os.getpid()}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file at; on success it is fsynced and renamed to ``path``.

    After an exception ``path`` is as it was and the temporary is gone. After SIGKILL ``path`` is
    as it was and the temporary stays until :func:`remove_orphans`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        yield temporary
        sync_file(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file for writing that appears at ``path`` whole, or not at all."""
    with (
        atomic_path(path) as temporary,
        temporary.open(mode, encoding=None if "b" in mode else "utf-8") as stream,
    ):
        yield stream
        stream.flush()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_write(path, "w") as stream:
        json.dump(value, stream, indent=1, ensure_ascii=False)
        stream.write("\n")


def remove_orphans(folder: Path) -> list[Path]:
    """Delete temporaries that dead processes left directly in ``folder``; return their paths."""
    removed = []
    for path in folder.glob(f"*{TEMPORARY_MARK}*"):
        owner = path.name.rsplit(TEMPORARY_MARK, 1)[1].split("-", 1)[0]
        if owner.isdigit() and _is_alive(int(owner)):
            continue
        if path.is_dir():
            _remove_tree(path)
        else:
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed


def file_manifest(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of each named file below ``folder``."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in names
    }


def manifest_problems(
    folder: Path, manifest: Mapping[str, Mapping[str, Any]], *, hashes: bool
) -> list[str]:
    """What differs from a :func:`file_manifest`; sizes only unless ``hashes``. Empty when sound.

    Names that point outside ``folder`` are problems, never opened.
    """
    problems = []
    root = folder.resolve()
    for name, entry in manifest.items():
        path = folder / name
        if not path.resolve().is_relative_to(root):
            problems.append(f"{name}: points outside {folder}")
        elif not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, expected {entry['bytes']}")
        elif hashes and sha256_file(path) != entry["sha256"]:
            problems.append(f"{name}: SHA-256 differs from the manifest's")
    return problems


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _is_alive(process_id: int) -> bool:
    if process_id == os.getpid():
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_tree(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
