"""The `ttt-adapt` command."""

from typing import Annotated

import typer

from ttt_adapt.cli import (
    convert,
    curriculum,
    doctor,
    evaluate,
    generate,
    index,
    predict,
    pretrain,
    read,
    report,
    select,
    vision,
)
from ttt_adapt.cli import demo as demo_command

app = typer.Typer(
    name="ttt-adapt",
    help="Test-time training: learn from the right passages of a corpus before each prediction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from ttt_adapt import __version__

        typer.echo(f"ttt-adapt {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Test-time training: learn from the right passages of a corpus before each prediction."""


app.add_typer(index.app, name="index")
app.add_typer(curriculum.app, name="curriculum")
app.command("select")(select.select)
app.command("predict")(predict.predict)
app.command("read")(read.read)
app.command("generate")(generate.generate)
app.command("eval")(evaluate.evaluate)
app.command("report")(report.report)
app.command("pretrain")(pretrain.pretrain)
app.command("convert")(convert.convert)
app.command("demo")(demo_command.demo)
app.add_typer(vision.app, name="vision")
app.command("doctor")(doctor.doctor)


def run() -> None:
    """Entry point of the installed command."""
    app()


if __name__ == "__main__":
    run()
