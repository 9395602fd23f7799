"""Files that are either whole or not there: temporary sibling, fsync, rename; manifests with hashes."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

TEMPORARY_MARK = ".partial-"
# Writers may add an ending of their own (".npy", "-wal") to the name they are given.
_TEMPORARY = re.compile(re.escape(TEMPORARY_MARK) + r"(\d+)-([0-9a-f]{8})(?:[.-].*)?\Z", re.DOTALL)
_OWN_TOKENS: set[str] = set()


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
    token = secrets.token_hex(4)
    _OWN_TOKENS.add(token)
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{os.getpid()}-{token}")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file at; on success it is fsynced and renamed to ``path``.

    The file gets the permissions of any new file, whatever the writer gave its own (safetensors
    keeps others out). After an exception ``path`` is as it was and the temporary is gone. After
    SIGKILL ``path`` is as it was and the temporary stays until :func:`remove_orphans`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    permissions = _new_file_permissions(temporary)
    try:
        yield temporary
        sync_file(temporary)
        temporary.chmod(permissions)
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
    """Delete temporaries that dead processes left directly in ``folder``; return their paths.

    Processes are known by number on this machine: a folder that several machines write to at once
    must not be given to this.
    """
    removed = []
    for path in folder.glob(f"*{TEMPORARY_MARK}*"):
        match = _TEMPORARY.search(path.name)
        if match is None or _is_in_use(int(match[1]), match[2]):
            continue
        if path.is_dir() and not path.is_symlink():
            # Another process may be collecting the same orphan.
            shutil.rmtree(path, ignore_errors=True)
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
    for name, entry in manifest.items():
        try:
            problem = _file_problem(folder, name, entry, hashes=hashes)
        except (OSError, RuntimeError, ValueError) as error:
            problem = f"cannot be read: {error}"
        except (KeyError, TypeError):
            problem = f"expected bytes and sha256 in the manifest, found {entry!r:.80}"
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _file_problem(folder: Path, name: str, entry: Mapping[str, Any], *, hashes: bool) -> str:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"points outside {folder}"
    num_bytes, sha256 = entry["bytes"], entry["sha256"]
    if not path.is_file():
        return "missing"
    if path.stat().st_size != num_bytes:
        return f"{path.stat().st_size} bytes, expected {num_bytes}"
    if hashes and sha256_file(path) != sha256:
        return "SHA-256 differs from the manifest's"
    return ""


def _new_file_permissions(unused: Path) -> int:
    # Asking for the umask means setting it, for other threads' files too; making a file does not.
    descriptor = os.open(unused, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        unused.unlink()


def _is_in_use(process_id: int, token: str) -> bool:
    if process_id == os.getpid():
        # In a container every run may have this number: only the token tells ours from an orphan.
        return token in _OWN_TOKENS
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
