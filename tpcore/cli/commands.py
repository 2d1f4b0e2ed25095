"""A group of commands, which all say in one line what is wrong: what, with which value, and the remedy; status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import BackendError, CheckpointError
from .console import echo

_UsageError: Any = typer.BadParameter.__base__  # typer has click's under a name of its own, by release
_REFUSALS = (ValueError, OSError, ImportError, BackendError, CheckpointError)


class Commands(TyperGroup):
    """Its commands raise what the library raises: ValueError, an error of the system, of a backend, of a checkpoint."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who read the output has seen enough
            raise
        except _UsageError as e:
            if e.ctx is None and (command := self.get_command(ctx, ctx.invoked_subcommand)) is not None:
                e.ctx = typer.Context(command, parent=ctx, info_name=ctx.invoked_subcommand)
            raise
        except _REFUSALS as e:
            where = "".join(f" ({note})" for note in getattr(e, "__notes__", []))
            echo(f"{ctx.command_path} {ctx.invoked_subcommand}: {' '.join(f'{e}{where}'.splitlines())}", err=True)
            raise typer.Exit(2) from e

    def main(self, args: Iterable[str] | None = None, *more: Any, **options: Any) -> Any:
        """Wrong words on the command line, too, are said in one line, and printed as text: names in them may have
        sequences that a terminal obeys."""
        alone = options.get("standalone_mode", True)
        try:
            words = [*_words([*(sys.argv[1:] if args is None else args)])]
            status = super().main(words, *more, **options | {"standalone_mode": False})
        except _UsageError as e:
            path, message = "tpcore" if e.ctx is None else e.ctx.command_path, e.format_message()
            if e.ctx is not None and message == e.ctx.get_help():
                echo(message, err=True)  # nothing but the command's name was given
            else:
                errors = getattr(e.__cause__, "errors", None)  # pydantic's, which typer asks from some release on
                given = f", not {errors()[0]['input']!r}" if errors else ""
                echo(f"{path}: {' '.join(message.split()).rstrip('.')}{given}; see {path} --help", err=True)
            status = e.exit_code
        if alone:
            sys.exit(status)
        return status


def _words(given: list[str]) -> Iterator[str]:
    """What was given, up to what is after ``--``, with the home folder for the ``~`` that bash leaves in
    ``--option=~/path``. An empty word would be the current folder."""
    own = given.index("--") if "--" in given else len(given)
    for at, word in enumerate(given[:own], 1):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if not value and (equals or not option):
            raise typer.BadParameter(f"word {at} is empty, {word!r}: give a value, or leave it out")
        yield f"{option}{equals}{os.path.expanduser(value) if option else value}"
    yield from given[own:]
