"""What of this machine a program's private root holds: the interpreter and chosen packages."""

import functools
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.errors import SandboxError

PACKAGES = "/packages"
"""Where packages lie in the private root, apart from whatever else is installed beside them."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
MOUNT_POINTS = ("/tmp", "/var/tmp", "/mnt", "/media", "/run")


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages that programs may import.

    Attributes:
        paths: their folders and files on this machine, shared libraries and metadata included.
    """

    paths: tuple[str, ...]

    def sys_path(self, *, isolated: bool) -> list[str]:
        """What a program's ``sys.path`` needs for them."""
        if isolated:
            return [PACKAGES] if self.paths else []
        return sorted({os.path.dirname(path) for path in self.paths})  # noqa: PTH120


@functools.cache
def visible_packages(names: tuple[str, ...]) -> Packages:
    """Find installed packages.

    Raises:
        SandboxError: one is not installed.
    """
    paths: dict[str, None] = {}
    for name in names:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        origin = spec.origin if spec is not None else None
        if origin is None:
            raise SandboxError(
                f"sandbox.packages: expected installed packages, found {name!r}, which is not; "
                "install it or take it out"
            )
        place = Path(origin).parent if Path(origin).name == "__init__.py" else Path(origin)
        # Wheels keep the libraries they bring in a folder beside.
        libraries = place.with_name(f"{name}.libs")
        metadata = [
            item
            for pattern in (f"{name}-*.dist-info", f"{name.replace('_', '-')}-*.dist-info")
            for item in place.parent.glob(pattern)
        ]
        for path in (place, libraries, *metadata):
            if path.exists():
                paths[str(path)] = None
    return Packages(tuple(paths))


def plan_root(packages: Packages, tmp_bytes: int) -> dict[str, Any]:
    """The argument of :func:`ttt_adapt.curriculum.sandbox.private_root.enter`."""
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for name in SYSTEM:
        if os.path.islink(name):  # noqa: PTH114
            links.append((name, os.readlink(name)))  # noqa: PTH115
        elif os.path.isdir(name):  # noqa: PTH112
            binds.append((name, name))
    for name in SYSTEM_FILES:
        if os.path.isfile(name):  # noqa: PTH113
            binds.append((name, name))
    prefixes = {sys.base_prefix, sys.base_exec_prefix, str(Path(os.__file__).resolve().parent)}
    for prefix in sorted(prefixes):
        if not any(Path(prefix).is_relative_to(target) for _, target in binds):
            binds.append((prefix, prefix))
    binds += [(path, f"{PACKAGES}/{Path(path).name}") for path in packages.paths]
    mount_point = next(name for name in MOUNT_POINTS if os.path.isdir(name))  # noqa: PTH112
    return {"binds": binds, "links": links, "mount_point": mount_point, "tmp_bytes": tmp_bytes}
