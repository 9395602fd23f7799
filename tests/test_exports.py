"""The package's face: what it offers, and that a glance at it costs next to nothing."""

import importlib
import subprocess
import sys

import pytest

import ttt_adapt

HEAVY = (
    "torch",
    "faiss",
    "transformers",
    "sentence_transformers",
    "datasets",
    "peft",
    "pyarrow",
    "matplotlib",
)


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ttt_adapt; ttt_adapt.__version__; dir(ttt_adapt)",
        "import ttt_adapt.config, ttt_adapt.configs, ttt_adapt.errors, ttt_adapt.types",
        "import ttt_adapt.storage, ttt_adapt.runtime; ttt_adapt.runtime.versions()",
        "import ttt_adapt.cli.main",
    ],
)
def test_light_imports_load_nothing_heavy(statement: str) -> None:
    assert modules_after(statement).isdisjoint(HEAVY)


def test_the_package_itself_loads_no_settings_either() -> None:
    assert modules_after("import ttt_adapt").isdisjoint({"numpy", "pydantic", "typer", "rich"})


def test_exported_names() -> None:
    assert ttt_adapt.__all__ == [
        "Index",
        "__version__",
        "bits_per_byte",
        "build_index",
        "evaluate",
        "load_embedder",
        "load_language_model",
        "nearest",
        "predict",
        "read_documents",
        "select",
        "sift",
    ]
    assert set(ttt_adapt.__all__) <= set(dir(ttt_adapt))


@pytest.mark.parametrize(
    ("room", "name"),
    [
        ("corpus", "read_documents"),
        ("embedding", "load_embedder"),
        ("evaluation", "bits_per_byte"),
        ("indexes", "Index"),
        ("models", "load_language_model"),
        ("pipeline", "build_index"),
        ("pipeline", "evaluate"),
        ("pipeline", "predict"),
        ("pipeline", "select"),
        ("selection", "nearest"),
        ("selection", "sift"),
    ],
)
def test_an_exported_name_is_its_rooms(room: str, name: str) -> None:
    owner = importlib.import_module(f"ttt_adapt.{room}")
    assert getattr(ttt_adapt, name) is getattr(owner, name)
    assert name in owner.__all__


@pytest.mark.parametrize(
    "room",
    [
        "adaptation",
        "configs",
        "corpus",
        "embedding",
        "evaluation",
        "evaluation.report",
        "indexes",
        "layers",
        "models",
        "models.ttt",
        "pipeline",
        "selection",
        "training",
    ],
)
def test_every_name_a_room_promises_is_there(room: str) -> None:
    module = importlib.import_module(f"ttt_adapt.{room}")
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None, name


def test_star_import_gives_what_is_promised() -> None:
    code = "from ttt_adapt import *\nprint(*dir())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert set(ttt_adapt.__all__) <= set(done.stdout.split())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ttt_adapt' has no attribute 'siff'"):
        _ = ttt_adapt.siff
    assert not hasattr(ttt_adapt, "__path_of_nothing__")


def test_the_version_is_the_installed_one() -> None:
    from importlib import metadata

    assert metadata.version("ttt-adapt") == ttt_adapt.__version__
