"""Names that load on first use: what type checkers are told is what running code finds."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ttt_adapt
from ttt_adapt.lazy_exports import lazy_exports

ROOT = Path(ttt_adapt.__file__).parents[1]
PACKAGES = sorted(
    ".".join(init.parent.relative_to(ROOT).parts)
    for init in (ROOT / "ttt_adapt").rglob("__init__.py")
    if "lazy_exports(" in init.read_text(encoding="utf-8")
)


def told(package: str) -> set[tuple[str, str]]:
    """Modules and names under ``if TYPE_CHECKING``."""
    source = ROOT.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8")
    return {
        (statement.module or "", name.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }


def test_there_are_such_packages() -> None:
    assert {"ttt_adapt", "ttt_adapt.evaluation", "ttt_adapt.vision"} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_told_is_the_one_found(package: str) -> None:
    found = import_module(package)
    names = told(package)
    assert names
    for module, name in names:
        assert getattr(found, name) is getattr(import_module(module), name)
        assert name in found.__all__
        assert name in dir(found)
    for name in found.__all__:
        assert hasattr(found, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = import_module(package).nothing


def test_a_name_loads_its_module_on_first_use_only() -> None:
    load, names = lazy_exports("ttt_adapt", {".selection": ("sift",), "json": ("dumps",)})
    import json

    assert load("dumps") is json.dumps
    assert load("sift") is ttt_adapt.sift
    assert {"sift", "dumps", "__version__"} <= set(names())


def test_importing_the_packages_loads_no_torch() -> None:
    imports = "; ".join(f"import {name}" for name in PACKAGES if name != "ttt_adapt.models")
    seen = subprocess.run(
        [sys.executable, "-c", f"{imports}; import sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.strip() == "False"
