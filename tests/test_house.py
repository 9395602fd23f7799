"""The rules of the house that a machine can check, and proof that each check can fail."""

import ast
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ttt_adapt
from ttt_adapt.config import ExperimentSettings, PretrainSettings, Settings, load_settings
from ttt_adapt.conversion_settings import ConvertSettings
from ttt_adapt.curriculum.training.settings import GRPOSettings
from ttt_adapt.errors import SettingsError
from ttt_adapt.vision.training.settings import VisionTrainSettings

ROOT = Path(__file__).parents[1]
ROOMS = ("cli", "configs", "indexes", "kernels")
"""Rooms that stand at the root, with a link to each from ``ttt_adapt``."""
MAX_LINES = 400

IGNORED = re.compile(
    r"\.(git|venv|pytest_cache|mypy_cache|ruff_cache|hypothesis)|__pycache__|build|dist|runs|out"
    r"|.*\.egg-info"
)
TEXT_SUFFIXES = {".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
VAGUE_NAMES = re.compile(
    r"(.*_)?(utils?|helpers?|common|misc|managers?|legacy|v\d+)", re.IGNORECASE
)
# Each pattern is written so that it does not match itself.
FORBIDDEN = {
    r"(?<![\w.~-])/wor[k]/|(?<![\w.~-])/roo[t]/|/hom[e]/\w": "a path of one machine",
    r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|npmjs[.]org|file[:]///": (
        "the address of a package index"
    ),
    r"as the spec say[s]|SPEC[.]md|shared/(fact[s]|desig[n]|dat[a])": "a working paper",
}
FORBIDDEN_OUTSIDE_TESTS = {r"(?<![\w.~-])/tm[p]/": "a temporary path"}
FORBIDDEN_IN_TESTS = {
    r"pytest[.](mark[.])?(ski[p]|xfai[l])|unittest[.]moc[k]|MagicMoc[k]": "a test that proves little"
}
# Where a kernel allows no namespaces, there is no isolation to try: missing hardware, so to speak.
MAY_BE_MISSING = "this machine's kernel allows no isolation"


def files(root: Path) -> Iterator[Path]:
    """Every file that could be committed, links not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not IGNORED.fullmatch(name))
        yield from (Path(folder, name) for name in sorted(names))


def length_problems(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {count} lines, at most {MAX_LINES}"
        for path in files(root)
        if path.suffix == ".py"
        and (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    ]


def name_problems(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {part} says nothing about what is in it"
        for path in files(root)
        for part in path.relative_to(root).with_suffix("").parts
        if path.suffix == ".py" and VAGUE_NAMES.fullmatch(part)
    ]


def link_problems(root: Path) -> list[str]:
    problems = []
    for room in ROOMS:
        link = root / "ttt_adapt" / room
        if not link.is_symlink() or str(link.readlink()) != f"../{room}":
            problems.append(f"ttt_adapt/{room}: expected a link to ../{room}")
        elif not link.is_dir():
            problems.append(f"ttt_adapt/{room}: the link leads nowhere")
    if (root / "kernels" / "__init__.py").exists():
        problems.append("kernels/__init__.py: would shadow the package `kernels` of the same name")
    return problems


def packages(root: Path) -> dict[str, Path]:
    """Dotted names and folders of every package, rooms behind links included."""
    found = {}
    for entry in [root / "ttt_adapt", *sorted((root / "ttt_adapt").iterdir())]:
        folder = entry.resolve()
        own = entry.name == "ttt_adapt"
        for init in [folder / "__init__.py"] if own else sorted(folder.rglob("__init__.py")):
            inside = init.parent.relative_to(folder).parts
            name = ".".join(["ttt_adapt", *([] if own else [entry.name]), *inside])
            if init.is_file():
                found[name] = init.parent
    return found


def package_problems(root: Path) -> list[str]:
    settings = pyproject(root)["tool"]["setuptools"]
    listed, found = settings["packages"], packages(root)
    problems = [f"{name}: not listed in pyproject.toml" for name in found if name not in listed]
    # kernels has no __init__.py, so it is a package only once it is listed.
    problems += [
        f"{name}: listed in pyproject.toml, not there"
        for name in listed
        if name not in found and name != "ttt_adapt.kernels"
    ]
    if listed != sorted(listed):
        problems.append("pyproject.toml: packages are not sorted")
    places = {"ttt_adapt": "ttt_adapt", **{f"ttt_adapt.{room}": room for room in ROOMS}}
    if settings["package-dir"] != places:
        problems.append(f"pyproject.toml: expected package-dir {places}")
    for name, folder in found.items():
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder)
            if len(inside.parts) > 1 and not (path.parent / "__init__.py").exists():
                problems.append(f"{name}: {inside} lies in a folder without __init__.py")
    return problems


def room_problems(root: Path) -> list[str]:
    """Each package says what it is for and what it offers; each room explains itself."""
    problems = []
    for name, folder in packages(root).items():
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        assigned = {
            target.id
            for node in tree.body
            for target in getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(target, ast.Name)
        }
        if not ast.get_docstring(tree):
            problems.append(f"{name}: no docstring")
        if "__all__" not in assigned:
            problems.append(f"{name}: no __all__")
        if name.count(".") == 1 and not (folder / "README.md").is_file():
            problems.append(f"{name}: no README.md")
    return problems


def recipe_problems(root: Path) -> list[str]:
    problems = []
    for path in sorted((root / "configs").glob("*.toml")):
        kind: type[Settings] = ExperimentSettings
        if path.name.startswith(("ablation_", "pretrain_", "ttt_", "transformer_")):
            kind = PretrainSettings
        elif path.name.startswith("convert_"):
            kind = ConvertSettings
        elif path.name.startswith("ttc_rl_"):
            kind = GRPOSettings
        elif path.name.startswith("vision_"):
            kind = VisionTrainSettings
        try:
            load_settings(kind, path)
        except SettingsError as error:
            problems.append(str(error))
    return problems


def text_problems(root: Path) -> list[str]:
    """Traces of one machine or one moment in files that everybody gets."""
    problems = []
    for path in files(root):
        place = path.relative_to(root)
        if path.suffix not in TEXT_SUFFIXES or path.name == "tokenizer.json" or path.is_symlink():
            continue
        in_tests = place.parts[0] == "tests"
        patterns = FORBIDDEN | (FORBIDDEN_IN_TESTS if in_tests else FORBIDDEN_OUTSIDE_TESTS)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        problems += [
            f"{place}:{number}: {reason}"
            for number, line in enumerate(lines, start=1)
            for pattern, reason in patterns.items()
            if re.search(pattern, line) and not (in_tests and MAY_BE_MISSING in line)
        ]
    return problems


def document_problems(root: Path) -> list[str]:
    """Commands named in README and CONTRIBUTING exist; the changelog knows this version."""
    targets = set(re.findall(r"(?m)^([a-z]+):", read(root, "Makefile")))
    main = read(root, "cli/main.py")
    commands = set(
        re.findall(r"app\.command\(\"([\w-]+)\"|add_typer\(\w+\.app, name=\"([\w-]+)\"", main)
    )
    known = {name for pair in commands for name in pair if name}
    problems = []
    for document in ("README.md", "CONTRIBUTING.md"):
        code = re.findall(r"(?s)```.*?```|`[^`\n]+`", read(root, document))
        for wanted in re.findall(r"(?m)(?:^|`)make ([a-z]+)", "\n".join(code)):
            if wanted not in targets:
                problems.append(f"{document}: make {wanted} is no target of the Makefile")
        for wanted in re.findall(r"(?m)(?:^|`)ttt-adapt ([a-z]+)", "\n".join(code)):
            if wanted not in known:
                problems.append(f"{document}: ttt-adapt {wanted} is no command")
    version = pyproject(root)["project"]["version"]
    if not re.search(rf"(?m)^## \[?{re.escape(version)}\b", read(root, "CHANGELOG.md")):
        problems.append(f"CHANGELOG.md: no entry for {version}")
    for target in ("check", "test", "wheel"):
        if f"make {target}" not in read(root, ".ci/run"):
            problems.append(f".ci/run: does not call make {target}")
    return problems


def pin_problems(root: Path) -> list[str]:
    """Pins are exact and portable, and every dependency we name has one that fits."""
    problems, pins = [], {}
    for line in read(root, "constraints.txt").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9A-Za-z.]*)", line)
            if match:
                pins[match[1]] = match[2]
            else:
                problems.append(f"constraints.txt: {line}: expected name==version, nothing else")
    project = pyproject(root)["project"]
    extras = [item for extra in project["optional-dependencies"].values() for item in extra]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        name = canonicalize_name(requirement.name)
        if name == project["name"]:
            continue
        if name not in pins:
            problems.append(f"constraints.txt: {name} is missing")
        elif not requirement.specifier.contains(pins[name], prereleases=True):
            problems.append(f"constraints.txt: {name}=={pins[name]} does not fit {requirement}")
    return problems


def pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads(read(root, "pyproject.toml"))


def read(root: Path, name: str) -> str:
    path = root / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


CHECKS: tuple[Callable[[Path], list[str]], ...] = (
    length_problems,
    name_problems,
    link_problems,
    package_problems,
    room_problems,
    recipe_problems,
    text_problems,
    document_problems,
    pin_problems,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_is_in_order(check: Callable[[Path], list[str]]) -> None:
    assert check(ROOT) == []


def test_one_version() -> None:
    assert pyproject(ROOT)["project"]["version"] == ttt_adapt.__version__


def test_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def a_sound_house(root: Path) -> Path:
    """The smallest tree that every check accepts."""
    write(root, "pyproject.toml", SOUND_PYPROJECT)
    write(root, "constraints.txt", "# pins\nnumpy==2.4.6\ntorch==2.13.0\n")
    write(root, "Makefile", "demo: .venv\n\techo\n")
    write(
        root, "README.md", "`make demo`, then\n```sh\nttt-adapt index build x\n```\nmake nothing\n"
    )
    write(root, "CHANGELOG.md", "# Changelog\n\n## 0.1.0\n")
    write(root, ".ci/run", "make check\nmake test\nmake wheel\n")
    write(
        root, "cli/main.py", 'app.command("demo")(demo)\napp.add_typer(index.app, name="index")\n'
    )
    write(root, "ttt_adapt/__init__.py", '"""Everything."""\n__all__: list[str] = []\n')
    for room in ROOMS:
        write(root, f"{room}/README.md", "A room.\n")
        if room != "kernels":
            write(root, f"{room}/__init__.py", '"""A room."""\n__all__ = []\n')
        (root / "ttt_adapt" / room).symlink_to(f"../{room}")
    return root


SOUND_PYPROJECT = """
[project]
name = "ttt-adapt"
version = "0.1.0"
dependencies = ["numpy>=2"]
optional-dependencies = { dev = ["torch>=2.7"] }
[tool.setuptools]
packages = ["ttt_adapt", "ttt_adapt.cli", "ttt_adapt.configs", "ttt_adapt.indexes"]
[tool.setuptools.package-dir]
ttt_adapt = "ttt_adapt"
"ttt_adapt.cli" = "cli"
"ttt_adapt.configs" = "configs"
"ttt_adapt.indexes" = "indexes"
"ttt_adapt.kernels" = "kernels"
"""


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sound_house_passes(tmp_path: Path, check: Callable[[Path], list[str]]) -> None:
    assert check(a_sound_house(tmp_path)) == []


@pytest.mark.parametrize(
    ("check", "name", "text", "expected"),
    [
        (length_problems, "tests/test_long.py", "\n" * 401, "tests/test_long.py: 401 lines"),
        (name_problems, "indexes/utils.py", "", "utils says nothing about what is in it"),
        (name_problems, "indexes/io_helpers.py", "", "io_helpers says nothing"),
        (name_problems, "cli/common/x.py", "", "common says nothing"),
        (link_problems, "kernels/__init__.py", "", "kernels/__init__.py: would shadow"),
        (package_problems, "indexes/deep/__init__.py", "", "ttt_adapt.indexes.deep: not listed"),
        (package_problems, "kernels/scan/__init__.py", "", "ttt_adapt.kernels.scan: not listed"),
        (package_problems, "indexes/deep/x.py", "", "folder without __init__.py"),
        (package_problems, "pyproject.toml", SOUND_PYPROJECT.replace(
            '"ttt_adapt.cli", ', '"ttt_adapt.attic", "ttt_adapt.cli", '
        ), "ttt_adapt.attic: listed in pyproject.toml, not there"),
        (package_problems, "pyproject.toml", SOUND_PYPROJECT.replace(
            '"ttt_adapt", "ttt_adapt.cli"', '"ttt_adapt.cli", "ttt_adapt"'
        ), "packages are not sorted"),
        (package_problems, "pyproject.toml", SOUND_PYPROJECT.replace('= "cli"', '= "command"'),
         "expected package-dir"),
        (room_problems, "indexes/__init__.py", "__all__ = []", "ttt_adapt.indexes: no docstring"),
        (room_problems, "indexes/__init__.py", '"""Room."""', "ttt_adapt.indexes: no __all__"),
        (recipe_problems, "configs/x.toml", "sed = 1", "unknown setting sed; did you mean seed?"),
        (recipe_problems, "configs/pretrain_x.toml", 'name = "x"', "sources: Field required"),
        (text_problems, "cli/x.py", 'x = "/wor' + 'k/main"', "cli/x.py:1: a path of one machine"),
        (text_problems, "cli/x.md", "see\nfile:" + "///opt", "cli/x.md:2: the address of a"),
        (text_problems, "cli/x.py", "# see shared/fac" + "ts", "cli/x.py:1: a working paper"),
        (text_problems, "benchmarks/x.py", "'/tm" + "p/x'", "x.py:1: a temporary path"),
        (text_problems, "tests/test_x.py", "@pytest.mark.ski" + "p", "a test that proves little"),
        (document_problems, "README.md", "`make coffee`", "make coffee is no target"),
        (document_problems, "README.md", "```\nttt-adapt dance\n```", "ttt-adapt dance is no command"),
        (document_problems, "CHANGELOG.md", "## 0.1.01", "CHANGELOG.md: no entry for 0.1.0"),
        (document_problems, ".ci/run", "make check\nmake test", "does not call make wheel"),
        (pin_problems, "constraints.txt", "numpy==2.4.6\ntorch>=2", "torch>=2: expected name=="),
        (pin_problems, "constraints.txt", "numpy==2.4.6\ntorch==2.13.0+cpu", "+cpu: expected name"),
        (pin_problems, "constraints.txt", "numpy==2.4.6", "constraints.txt: torch is missing"),
        (pin_problems, "constraints.txt", "numpy==1.9\ntorch==2.13.0", "does not fit numpy>=2"),
    ],
)  # fmt: skip
def test_what_is_out_of_order_is_found(
    tmp_path: Path, check: Callable[[Path], list[str]], name: str, text: str, expected: str
) -> None:
    write(a_sound_house(tmp_path), name, text)
    assert expected in "\n".join(check(tmp_path))


def test_broken_links_are_found(tmp_path: Path) -> None:
    a_sound_house(tmp_path)
    (tmp_path / "ttt_adapt" / "cli").unlink()
    (tmp_path / "ttt_adapt" / "indexes").unlink()
    (tmp_path / "ttt_adapt" / "indexes").mkdir()
    (tmp_path / "kernels" / "README.md").unlink()
    (tmp_path / "kernels").rmdir()
    assert link_problems(tmp_path) == [
        "ttt_adapt/cli: expected a link to ../cli",
        "ttt_adapt/indexes: expected a link to ../indexes",
        "ttt_adapt/kernels: the link leads nowhere",
    ]


def test_a_room_without_readme_is_found(tmp_path: Path) -> None:
    a_sound_house(tmp_path)
    (tmp_path / "indexes" / "README.md").unlink()
    assert room_problems(tmp_path) == ["ttt_adapt.indexes: no README.md"]
