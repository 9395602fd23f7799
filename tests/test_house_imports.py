"""Imports point down: each room may use those below it, never a peer, never one above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FOUNDATION = {
    "closing",
    "config",
    "configs",
    "conversion_settings",
    "errors",
    "lazy_exports",
    "runtime",
    "settings",
    "storage",
    "types",
}
LEVELS = (
    {"cli"},
    {"demo", "doctor"},
    {"pipeline"},
    {"curriculum", "vision"},
    {"evaluation", "training"},
    {"adaptation"},
    {"models"},
    {"layers", "selection"},
    {"corpus", "embedding", "indexes"},
    {"kernels"},
    FOUNDATION,
)
"""From the top. Rooms of one level are peers; only those of the foundation may use each other."""
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
TESTS_ONLY = "testing"


def import_problems(root: Path) -> list[str]:
    """Imports below ``root/ttt_adapt``, wherever in a module, that do not point down."""
    problems = []
    for room, path in sorted(modules(root)):
        where = path.relative_to(root) if path.is_relative_to(root) else path
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            problem = judge(room, name)
            if problem:
                problems.append(f"{where}:{line}: {problem}")
    return problems


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Each module's room and file; rooms behind links included."""
    for entry in (root / "ttt_adapt").iterdir():
        if entry.suffix == ".py":
            if entry.stem != "__init__":
                yield entry.stem, entry
        elif entry.is_dir() and entry.name != "__pycache__":
            for path in entry.resolve().rglob("*.py"):
                yield entry.name, path


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of a module of ours; relative ones with their dots."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from ttt_adapt import pipeline` imports a room, not a name of the package.
            names = [f"{base}.{a.name}" for a in node.names] if base == "ttt_adapt" else [base]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            if called in {"import_module", "__import__"}:
                names = [str(node.args[0].value)]
        for name in names:
            if name.split(".")[0] in {"ttt_adapt", ""}:
                yield getattr(node, "lineno", 0), name


def judge(room: str, name: str) -> str:
    """Why ``room`` may not import ``name``; empty when it may."""
    if name.startswith("."):
        return f"relative import {name}"
    target = f"{name}.".split(".")[1]
    if target in {"", "__version__"} or target == room:
        return ""
    if target == TESTS_ONLY:
        return f"{room} imports {target}, which is for tests only"
    if room == TESTS_ONLY:
        return ""
    for known in (room, target):
        if known not in LEVEL_OF:
            return f"{known} is no room of the house: give it a level, or name the room itself"
    if room in FOUNDATION and target in FOUNDATION:
        return ""
    if LEVEL_OF[target] == LEVEL_OF[room]:
        return f"{room} imports its peer {target}"
    return f"{room} imports {target}, above it" if LEVEL_OF[target] < LEVEL_OF[room] else ""


def test_imports_point_down() -> None:
    assert import_problems(ROOT) == []


def test_every_module_is_seen() -> None:
    seen = {room for room, _ in modules(ROOT)}
    assert seen >= {"cli", "configs", "indexes", "selection", "pipeline", "config", "errors"}


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("selection/sift.py", "from ttt_adapt.models import x", "selection imports models, above"),
        (
            "selection/sift.py",
            "import ttt_adapt.pipeline as p",
            "selection imports pipeline, above",
        ),
        (
            "selection/sift.py",
            "from ttt_adapt import pipeline",
            "selection imports pipeline, above",
        ),
        ("selection/sift.py", "from ttt_adapt import sift", "sift is no room of the house"),
        ("corpus/a.py", "def f():\n  import ttt_adapt.cli", "a.py:2: corpus imports cli, above it"),
        ("corpus/a.py", "from ttt_adapt.indexes import x", "corpus imports its peer indexes"),
        ("corpus/a.py", "from ttt_adapt.attic import x", "attic is no room of the house"),
        ("corpus/a.py", "from . import b", "relative import"),
        ("corpus/a.py", "from ..cli import b", "relative import ..cli"),
        (
            "corpus/a.py",
            "importlib.import_module('ttt_adapt.cli.main')",
            "corpus imports cli, above",
        ),
        ("corpus/a.py", "import ttt_adapt.testing", "testing, which is for tests only"),
        ("attic/a.py", "import ttt_adapt.errors", "attic is no room of the house"),
        ("errors.py", "from ttt_adapt.corpus import x", "errors imports corpus, above it"),
        ("doctor.py", "from ttt_adapt.demo import x", "doctor imports its peer demo"),
    ],
)
def test_an_import_that_does_not_point_down_is_found(
    tmp_path: Path, file: str, source: str, expected: str
) -> None:
    write_module(tmp_path, file, source)
    (problem,) = import_problems(tmp_path)
    assert expected in problem


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli/main.py", "from ttt_adapt import __version__, pipeline"),
        ("config.py", "from ttt_adapt.errors import x\nfrom ttt_adapt.settings import y"),
        (
            "corpus/a.py",
            "import os, ttt_adapt\nfrom ttt_adapt.corpus.b import x\nprint('ttt_adapt.cli')",
        ),
        ("indexes/a.py", "from ttt_adapt.storage import x"),
        ("testing.py", "from ttt_adapt.models import x"),
        ("__init__.py", "from ttt_adapt.cli import x"),
    ],
)
def test_other_imports_are_welcome(tmp_path: Path, file: str, source: str) -> None:
    write_module(tmp_path, file, source)
    assert import_problems(tmp_path) == []


def test_rooms_behind_links_are_checked(tmp_path: Path) -> None:
    (tmp_path / "indexes").mkdir()
    (tmp_path / "indexes" / "store.py").write_text("import ttt_adapt.cli")
    (tmp_path / "ttt_adapt").mkdir()
    (tmp_path / "ttt_adapt" / "indexes").symlink_to("../indexes")
    assert import_problems(tmp_path) == ["indexes/store.py:1: indexes imports cli, above it"]


def write_module(root: Path, file: str, source: str) -> None:
    path = root / "ttt_adapt" / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
