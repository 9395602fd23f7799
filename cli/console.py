"""What commands share: errors as one line, JSON on standard output, everything else on error."""

import contextlib
import functools
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from ttt_adapt.config import ExperimentSettings, Settings

P = ParamSpec("P")
R = TypeVar("R")
SettingsType = TypeVar("SettingsType", bound="Settings")

INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done and what it costs; do nothing.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of every random choice.")]
Config = Annotated[
    str | None,
    typer.Option("--config", "-c", help="A TOML file, or the name of a recipe shipped with this."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting, e.g. --set selection.noise_var=0.1; repeatable."),
]


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors into one line on standard error and the exit code their class names."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from ttt_adapt.errors import TTTAdaptError

        try:
            return command(*args, **kwargs)
        except TTTAdaptError as error:
            complain(" ".join(str(error).split()))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            complain("interrupted; what was finished is kept, the same command continues")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output went away: nothing left to say, and nobody to say it to.
            sys.stderr.close()
            raise typer.Exit(1) from None
        except MemoryError:
            complain("out of memory: lower batch sizes or num_candidates, or use --dry-run first")
            raise typer.Exit(3) from None

    return run


def complain(message: str) -> None:
    """One line on standard error."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False)


def say(message: str) -> None:
    """A line for people, on standard error."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False)


def print_json(value: Any) -> None:
    """One JSON object on standard output; NaN becomes null."""
    sys.stdout.write(json.dumps(jsonable(value), ensure_ascii=False, indent=1) + "\n")


def jsonable(value: Any) -> Any:
    """Dataclasses, arrays, paths and NaN as plain JSON values."""
    import dataclasses
    import math

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return value


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on standard output, its first column left-aligned, as wide as it needs to be."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(header_style="bold", show_edge=False)
    for position, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if column == "text" or not position else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False)
    console.print(f"\n[bold]{escape(title)}[/]", soft_wrap=True)
    console.print(table)


def print_facts(title: str, facts: dict[str, str]) -> None:
    """Names and what is known under them, a line each; empty ones are left out."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value:
            table.add_row(f"[dim]{escape(name)}[/]", escape(value))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    console.print(table)


@contextlib.contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar with rate and time left on standard error; yields ``update(done, total, text)``."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.1f}/s" if speed else "", style="dim")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)

        def update(done: int, total: int | None = None, text: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield update


def read_config(kind: "type[SettingsType]", config: str | None) -> "SettingsType":
    """Settings from a file, a shipped recipe, or the defaults."""
    from ttt_adapt.config import load_settings, make_settings
    from ttt_adapt.configs import config_path

    if config is None:
        return make_settings(kind, {})
    path = Path(config)
    return load_settings(kind, path if path.suffix == ".toml" else config_path(config))


def parse_assignments(assignments: list[str] | None) -> dict[str, Any]:
    """``a.b=value`` strings as dotted keys and TOML values; bare words are strings."""
    from ttt_adapt.errors import SettingsError

    values: dict[str, Any] = {}
    for assignment in assignments or []:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--set: expected key=value, found {assignment!r}")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text
    return values


def parse_numbers(text: str) -> list[int]:
    """``0,1,2`` as whole numbers, none of them negative."""
    from ttt_adapt.errors import SettingsError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingsError(f"expected whole numbers separated by commas, found {text!r}")
    return [int(part) for part in parts]


def experiment(
    config: str | None,
    seed: int | None,
    assignments: list[str] | None,
    **options: Any,
) -> "ExperimentSettings":
    """An experiment's settings: the file's, then options given (dots as ``__``), then ``--set``."""
    from ttt_adapt.config import ExperimentSettings, override

    settings = read_config(ExperimentSettings, config)
    changes = {key.replace("__", "."): value for key, value in options.items() if value is not None}
    if seed is not None:
        changes |= {"seed": seed, "evaluation.seed": seed}
    return override(settings, changes | parse_assignments(assignments))


def read_input(text: str | None, file: Path | None) -> str:
    """A text from an argument, a file, or standard input (``-`` or neither given)."""
    from ttt_adapt.errors import UserError

    if text is not None and file is not None:
        raise UserError("expected a text or --file, found both")
    if file is not None:
        if not file.is_file():
            raise UserError(f"{file}: no such file")
        raw, name = file.read_bytes(), str(file)
    elif text is not None and text != "-":
        return text
    else:
        raw, name = sys.stdin.buffer.read(), "standard input"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: expected UTF-8 text, found byte 0x{raw[error.start]:02x} at {error.start}"
        ) from None
