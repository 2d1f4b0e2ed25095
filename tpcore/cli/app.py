"""The command line's table of contents: the core's commands, then those that extensions add."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ..backend.extensions import manager
from ..settings import __version__
from .console import echo, printable
from .doctor import backends, compile_ahead, doctor

_UsageError: Any = typer.BadParameter.__base__  # typer has click's under a name of its own, by release


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Names of files in a usage error, which typer prints as they are, may have sequences a terminal obeys."""
        try:
            return super().invoke(ctx)
        except _UsageError as e:
            e.message = printable(e.message, "\n")
            raise


app = typer.Typer(
    cls=_Commands,
    help="Tensor parallelism for PyTorch: inspect what is installed here.",
    no_args_is_help=True,
    add_completion=False,
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
