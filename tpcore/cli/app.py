"""The command line's table of contents: the core's commands, then those that extensions add."""

from __future__ import annotations

import typer

from ..backend.registry import manager
from ..settings import __version__
from .commands import Commands
from .console import echo
from .doctor import backends, compile_ahead, doctor

app = typer.Typer(
    name="tpcore",
    cls=Commands,
    help="""Tensor parallelism for PyTorch, before a job and after it.

    \b
    Examples:
      tpcore doctor
      tpcore plan config.json --machine h100x8
      tpcore serve path/to/model --tp 2

    \b
    Each command has its own: tpcore COMMAND --help.
    Docs: docs/first-hour.md
    """,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},  # those of its commands too
    rich_markup_mode=None,  # whose panels cut the names of options where a terminal has 80 columns
    pretty_exceptions_enable=False,  # its tracebacks print local variables, here whole tensors
)


def _version(show: bool) -> None:
    if show:
        echo(f"tpcore {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_version, is_eager=True
    ),
) -> None:
    """Takes the options that stand before a command."""


app.command()(backends)
app.command("compile")(compile_ahead)
app.command()(doctor)
manager().hook.tpcore_commands(app=app)
