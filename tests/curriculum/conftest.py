"""One sandbox and one verifier for the room's tests, as each starts a process; malformed rows."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.corpus import ReadProblems
from ttt_adapt.curriculum import (
    Sandbox,
    SandboxSettings,
    TaskSourceSettings,
    Verifier,
    import_tasks,
)
from ttt_adapt.errors import SandboxError, TaskError
from ttt_adapt.testing import imported_tasks, write_rows


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


@pytest.fixture
def check_malformed(
    tmp_path: Path,
) -> Callable[[Sequence[dict[str, Any]], dict[str, Any], str], None]:
    """A row after a sound one of the same layout fails for this reason, or is skipped."""

    def check(sound: Sequence[dict[str, Any]], row: dict[str, Any], reason: str) -> None:
        good = next(one for one in sound if one.keys() <= row.keys() | {"level", "type"})
        path = write_rows(tmp_path / "rows.jsonl", good, "[1]", row)
        with pytest.raises(TaskError, match=r"rows.jsonl:2: expected a JSON object"):
            imported_tasks(path)
        path = write_rows(tmp_path / "rows.jsonl", good, row)
        with pytest.raises(TaskError, match=r"rows.jsonl:2: .*set on_error to 'skip'") as error:
            imported_tasks(path)
        assert reason in str(error.value)
        found = ReadProblems()
        settings = TaskSourceSettings(path=path, on_error="skip")
        assert list(import_tasks(settings, problems=found))
        assert found.num_skipped == 1
        assert reason in found.problems[0].reason

    return check
