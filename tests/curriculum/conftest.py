"""One sandbox and one verifier for the room's tests: each starts a process."""

from collections.abc import Iterator

import pytest

from ttt_adapt.curriculum import Sandbox, SandboxSettings, Verifier
from ttt_adapt.errors import SandboxError


def isolated(settings: SandboxSettings) -> Sandbox:
    """A sandbox of full isolation, or a skipped test where the kernel allows no namespaces."""
    made = Sandbox(settings)
    try:
        assert made.strength.is_isolated
    except SandboxError as error:
        made.close()
        pytest.skip(f"this machine's kernel allows no isolation: {error}")
    return made


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """For programs that are to pass, or to fail by themselves."""
    with isolated(SandboxSettings(cpu_s=4.0, wall_s=15.0, memory_mb=768)) as made:
        yield made


@pytest.fixture(scope="session")
def hasty() -> Iterator[Sandbox]:
    """For programs that are to be ended."""
    settings = SandboxSettings(
        cpu_s=1.0, wall_s=3.0, memory_mb=256, output_mb=1, file_mb=4, packages=()
    )
    with isolated(settings) as made:
        yield made


@pytest.fixture(scope="session")
def verifier(sandbox: Sandbox) -> Iterator[Verifier]:
    with Verifier(sandbox=sandbox) as made:
        yield made
