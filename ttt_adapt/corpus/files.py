"""From a corpus' path to its format and its files, in an order that does not depend on the disk."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import pathspec

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.streams import COMPRESSED_SUFFIXES
from ttt_adapt.errors import CorpusError
from ttt_adapt.storage import TEMPORARY_MARK

HUB_PREFIX = "hub:"
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "text": (".txt", ".text", ".md", ".rst"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
}
COMPRESSIBLE = ("jsonl", "text")
COMPANIONS = ("readme", "license", "licence", "manifest", "dataset_info", "state", "checksums")
"""Files that lie beside data without being part of it, by the beginning of their names."""


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file and its name within the corpus.

    Attributes:
        label: path relative to the corpus with ``/``: unique in it, and the same on every machine.
    """

    path: Path
    label: str


@dataclass(frozen=True, slots=True)
class Place:
    """What a corpus' path turned out to be.

    Attributes:
        format: one of ``jsonl``, ``text``, ``tree``, ``parquet``, ``arrow``, ``hub``.
        root: the directory, or the file itself.
        files: the files to read; empty for ``tree`` and ``hub``, which are found while reading.
    """

    format: str
    root: Path
    files: tuple[CorpusFile, ...] = ()


def is_hub(settings: CorpusSettings) -> bool:
    """Whether the path names a hub data set, not files."""
    return settings.format == "hub" or settings.path.startswith(HUB_PREFIX)


def locate(settings: CorpusSettings) -> Place:
    """Decide a corpus' format and list its files.

    A file's format follows from its suffix. A directory whose files are all of one data format
    (README and the like aside) is that format's; any other is a tree.

    Raises:
        CorpusError: nothing is there, the format cannot be told, or no file is of the format.
    """
    path = settings.path
    if is_hub(settings):
        if settings.format not in ("auto", "hub"):
            raise CorpusError(
                f"{path} names a hub data set, but format is {settings.format!r}; expected 'hub'"
            )
        return Place("hub", Path(path.removeprefix(HUB_PREFIX)))
    root = Path(path).expanduser()
    if root.is_dir():
        return _directory(root, settings)
    if root.is_file():
        return _listed(root, [root], root.parent, settings)
    # Path.glob takes no absolute pattern.
    matches = [Path(name) for name in glob.glob(str(root), recursive=True)]  # noqa: PTH207
    files = sorted(match for match in matches if match.is_file())
    if files:
        return _listed(root, files, _fixed_part(root), settings)
    if root.exists():
        raise CorpusError(f"{path}: expected a file or a directory, found something else")
    kind = "file matches" if glob.has_magic(str(root)) else "such file or directory"
    raise CorpusError(f"{path}: no {kind}; a hub data set is written {HUB_PREFIX}owner/name")


def format_of(path: PurePath) -> str | None:
    """The format that a file's suffix tells, or ``None``."""
    suffix = path.suffix.lower()
    compressed = suffix in COMPRESSED_SUFFIXES
    if compressed:
        suffix = PurePath(path.stem).suffix.lower()
    for name, suffixes in SUFFIXES.items():
        if suffix in suffixes and (name in COMPRESSIBLE or not compressed):
            return name
    return None


def matcher(patterns: Sequence[str], setting: str) -> Callable[[str], bool | None]:
    """Whether gitignore-style patterns take a path in (True), out (False), or say nothing.

    Directories are asked about with a ``/`` at their end; of several matches the last one counts.

    Raises:
        CorpusError: a pattern is none; the message names the setting it came from.
    """
    try:
        spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise CorpusError(f"{setting}: {error}; expected gitignore-style patterns") from None
    return lambda relative: spec.check_file(relative).include if patterns else None


def label_of(relative: str) -> str:
    """A relative path as text with a UTF-8 form, also for names that have none."""
    raw = os.fsencode(relative.replace(os.sep, "/"))
    return raw.decode("utf-8", "backslashreplace")


def _directory(root: Path, settings: CorpusSettings) -> Place:
    chosen: str = settings.format
    if chosen == "tree":
        return Place("tree", root)
    if chosen == "auto":
        found = _common_format(root)
        if found is None:
            return Place("tree", root)
        chosen = found
    taken = matcher(settings.include, "include")
    left_out = matcher(settings.exclude, "exclude")
    files = []
    suffixes = set()
    for relative in _data_files(root):
        suffixes.add("".join(PurePath(relative).suffixes[-2:]) or "no suffix")
        fits = taken(relative) if settings.include else format_of(PurePath(relative)) == chosen
        if fits and not left_out(relative):
            files.append(CorpusFile(root / relative, label_of(relative)))
    if not files:
        raise CorpusError(
            f"{settings.path}: no {chosen} files ({', '.join(SUFFIXES[chosen])}); "
            f"found: {', '.join(sorted(suffixes)[:8]) or 'no files'}"
        )
    return Place(chosen, root, tuple(files))


def _listed(root: Path, paths: Sequence[Path], base: Path, settings: CorpusSettings) -> Place:
    chosen: str = settings.format
    if chosen == "tree":
        raise CorpusError(f"{settings.path}: format is 'tree': expected a directory, found a file")
    if chosen == "auto":
        formats = {path: format_of(path) for path in paths}
        unknown = [path for path, found in formats.items() if found is None]
        if unknown:
            known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
            raise CorpusError(
                f"{unknown[0]}: its suffix tells no format; known are {known}, and JSON lines and "
                "text also with .zst or .gz; set format, e.g. to 'text'"
            )
        found = sorted({name for name in formats.values() if name})
        if len(found) > 1:
            raise CorpusError(
                f"{settings.path}: files of several formats ({', '.join(found)}); "
                "set format or narrow the pattern"
            )
        chosen = found[0]
    files = [CorpusFile(path, label_of(os.path.relpath(path, base))) for path in paths]
    return Place(chosen, root, tuple(files))


def _common_format(root: Path) -> str | None:
    """The one data format that all of a directory's files share; ``None`` otherwise."""
    common = None
    for relative in _data_files(root):
        name = PurePath(relative).name
        if name.lower().startswith(COMPANIONS):
            continue
        found = format_of(PurePath(relative))
        # Prose written for people lies in every source tree; only .txt is taken for data.
        if found is None or (found == "text" and ".txt" not in PurePath(relative).suffixes):
            return None
        if common not in (None, found):
            return None
        common = found
    return common


def _data_files(root: Path) -> Iterator[str]:
    """Relative paths below ``root``, sorted; nothing hidden, no unfinished files.

    Links to files are followed (the hub's cache is made of them), links to directories are not.
    """
    for folder, directories, names in os.walk(root):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118 - the name may be no UTF-8
            if name.startswith(".") or TEMPORARY_MARK in name or not os.path.isfile(path):  # noqa: PTH113
                continue
            yield os.path.relpath(path, root).replace(os.sep, "/")


def _fixed_part(pattern: Path) -> Path:
    """The longest beginning of a glob pattern without wildcards: what labels are relative to."""
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()
