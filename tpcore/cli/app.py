"""The command line's table of contents: a command is a module here and a line below; a group of them is a Typer."""

from __future__ import annotations

import typer

from ..settings import __version__
from .checkpoint import checkpoint
from .console import echo
from .doctor import backends, compile_ahead, doctor
from .explain import explain_step
from .migrate import migrate
from .plan import plan_mesh
from .serve import serve
from .verify import verify

app = typer.Typer(
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
app.command("explain")(explain_step)
app.command()(migrate)
app.command("plan")(plan_mesh)
app.command()(serve)
app.command()(verify)
app.add_typer(checkpoint, name="checkpoint")
