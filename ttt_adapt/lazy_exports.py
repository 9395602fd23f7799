"""Names of a package that load on first use, so that importing it costs nothing."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from sys import modules
from typing import Any


def lazy_exports(
    package: str, names_of: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: The package's ``__name__``.
        names_of: Modules, relative to the package (``".scoring"``) or with their whole names, and
            what each of them exports.

    Returns:
        What the package binds to ``__getattr__`` and ``__dir__``. Nothing is kept: each use asks
        the module that defines the name. Type checkers need the same imports under
        ``TYPE_CHECKING``; a test of the house holds the two against each other.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    def names() -> list[str]:
        return sorted({*vars(modules[package]), *module_of})

    return load, names
