"""One sandbox and one verifier for the room's tests: each starts a process."""

from collections.abc import Iterator

import pytest

from ttt_adapt.curriculum import Sandbox, SandboxSettings, Verifier


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Full isolation: on a machine that has none these tests fail, saying what to do about it."""
    with Sandbox(SandboxSettings(cpu_s=4.0, wall_s=15.0, memory_mb=768)) as made:
        assert made.strength.is_isolated
        yield made


@pytest.fixture(scope="session")
def hasty() -> Iterator[Sandbox]:
    """For programs that are to be ended."""
    settings = SandboxSettings(
        cpu_s=1.0, wall_s=3.0, memory_mb=256, output_mb=1, file_mb=4, packages=()
    )
    with Sandbox(settings) as made:
        yield made


@pytest.fixture(scope="session")
def verifier(sandbox: Sandbox) -> Iterator[Verifier]:
    with Verifier(sandbox=sandbox) as made:
        yield made
