"""Commands in this process, for a process of its own takes seconds to start."""

import json
from typing import Any


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``ttt-adapt ARGUMENTS``.

    Raises:
        AssertionError: the command ended with a traceback.
    """
    from typer.testing import CliRunner

    from ttt_adapt.cli.main import app

    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"a traceback: {result.exception!r}") from result.exception
    return result.exit_code, result.stdout, result.stderr


def invoke_json(*arguments: object) -> Any:
    """What the command prints with ``--json``.

    Raises:
        AssertionError: it failed.
    """
    code, stdout, stderr = invoke(*arguments, "--json")
    assert code == 0, stderr
    return json.loads(stdout)
