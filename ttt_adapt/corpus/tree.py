"""Source trees: every text file that version control would keep, in sorted order."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pathspec

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import CorpusFile, label_of, matcher
from ttt_adapt.corpus.problems import Problem, explain

EXCLUDED_NAMES = frozenset((
    # Version control, environments, caches, editors
    ".git", ".hg", ".svn", "__pycache__", "node_modules", "bower_components", ".venv", "venv",
    ".tox", ".nox", ".eggs", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis",
    ".ipynb_checkpoints", ".cache", ".gradle", ".idea", ".vscode", ".DS_Store",
    # Made by building
    "build", "dist",
))  # fmt: skip
"""Directories left out of every tree, by name; of files only ``.git`` and ``.DS_Store``."""

EXCLUDED_SUFFIXES = frozenset((
    # Made by building
    "pyc", "pyo", "pyd", "so", "o", "a", "lib", "dll", "dylib", "exe", "class", "jar", "wasm", "map",
    # Archives, images, sound, fonts, documents: some have no NUL byte where it is looked for
    "zip", "gz", "bz2", "xz", "zst", "7z", "tar", "tgz", "whl", "png", "jpg", "jpeg", "gif", "bmp",
    "ico", "webp", "tif", "tiff", "pdf", "mp3", "mp4", "wav", "ogg", "avi", "mov", "ttf", "otf",
    "woff", "woff2", "eot",
    # Arrays, weights, tables, databases
    "npy", "npz", "pkl", "pickle", "pt", "pth", "bin", "safetensors", "onnx", "h5", "hdf5",
    "parquet", "arrow", "feather", "sqlite", "sqlite3", "db",
))  # fmt: skip
"""Files left out of every tree, by suffix in any case; also ``*.so.*``, ``*.min.js`` and the
directories ``*.egg-info``. A pattern of ``exclude`` that begins with ``!`` takes them in again."""

IGNORE_FILE = ".gitignore"


@dataclass(frozen=True, slots=True)
class _Ignores:
    """The .gitignore files above a place as one list, the nearest last, seen from the root."""

    patterns: tuple[str, ...]
    spec: pathspec.GitIgnoreSpec


@dataclass(frozen=True, slots=True)
class _Folder:
    relative: str
    ignores: _Ignores | None


def tree_files(root: Path, settings: CorpusSettings) -> Iterator[CorpusFile | Problem]:
    """Files of a tree, sorted by relative path; a directory that cannot be listed is a problem.

    Left out are :data:`EXCLUDED_NAMES` and :data:`EXCLUDED_SUFFIXES`, what a .gitignore in the tree ignores (the nearest one
    that has an opinion counts, as git has it), ``exclude``, and with ``include`` what that does
    not match. Symbolic links are not followed: inside the tree they lead to files it has anyway,
    out of it to files nobody asked for, and neither can loop.
    """
    left_out = matcher(settings.exclude, "exclude")
    taken = matcher(settings.include, "include")
    waiting: list[_Folder | CorpusFile] = [_Folder("", None)]
    while waiting:
        current = waiting.pop()
        if isinstance(current, CorpusFile):
            yield current
            continue
        try:
            found = _entries(root, current, left_out)
        except OSError as error:
            where = label_of(current.relative) or label_of(root.name)
            yield Problem(where, f"cannot be listed: {explain(error)}")
            continue
        for entry in reversed(found):
            if isinstance(entry, CorpusFile) and settings.include and not taken(entry.label):
                continue
            waiting.append(entry)


def _entries(
    root: Path, folder: _Folder, left_out: Callable[[str], bool | None]
) -> list[_Folder | CorpusFile]:
    """What is kept of one directory, sorted as whole paths sort (``a-b`` before ``a/b``)."""
    with os.scandir(root / folder.relative) as listing:
        entries = list(listing)
    ignores = folder.ignores
    if any(e.name == IGNORE_FILE and e.is_file(follow_symlinks=False) for e in entries):
        ignores = _read_ignores(root, folder)
    kept: list[tuple[str, _Folder | CorpusFile]] = []
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_folder and not entry.is_file(follow_symlinks=False):
            continue
        relative = folder.relative + entry.name + ("/" if is_folder else "")
        verdict = left_out(relative)
        if verdict is None:
            verdict = is_excluded_by_default(entry.name, is_folder)
        if verdict or (ignores is not None and ignores.spec.match_file(relative)):
            continue
        item: _Folder | CorpusFile
        if is_folder:
            item = _Folder(relative, ignores)
        else:
            item = CorpusFile(root / relative, label_of(relative))
        kept.append((relative, item))
    return [item for _, item in sorted(kept, key=lambda pair: os.fsencode(pair[0]))]


def is_excluded_by_default(name: str, is_folder: bool) -> bool:
    """Whether a directory or file of this name is left out where ``exclude`` says nothing."""
    if is_folder:
        return name in EXCLUDED_NAMES or name.endswith(".egg-info")
    if name in (".git", ".DS_Store") or name.endswith(".min.js") or ".so." in name:
        return True
    stem, dot, suffix = name.rpartition(".")
    return bool(stem and dot) and suffix.lower() in EXCLUDED_SUFFIXES


def _read_ignores(root: Path, folder: _Folder) -> _Ignores:
    data = (root / folder.relative / IGNORE_FILE).read_bytes()
    patterns = list(folder.ignores.patterns) if folder.ignores else []
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        # git passes over lines it cannot make sense of; so does this.
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        if line.strip() and not line.startswith("#"):
            patterns.append(rooted_pattern(line, folder.relative))
    return _Ignores(tuple(patterns), pathspec.GitIgnoreSpec.from_lines(patterns))


def rooted_pattern(line: str, folder: str) -> str:
    """A line of the .gitignore in ``folder`` (``a/b/``, empty at the root) as the root's would say.

    A final ``/**`` becomes ``/**/*``, which means the same to git: pathspec takes the former for
    the directory itself too, and with it for what a later line takes in again.
    """
    body = line.rstrip() + " " if line.rstrip().endswith("\\") else line.rstrip()
    negation = "!" if body.startswith("!") else ""
    body = body.removeprefix("!")
    if body.endswith("/**"):
        body += "/*"
    if not folder:
        return negation + body
    if body.startswith(("\\!", "\\#")):
        body = body[1:]
    place = re.sub(r"([\\*?\[\] !#])", r"\\\1", folder)
    anywhere = "/" not in body.rstrip("/")
    return f"{negation}/{place}{'**/' if anywhere else ''}{body.lstrip('/')}"
