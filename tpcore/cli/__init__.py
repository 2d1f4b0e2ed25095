"""The entry point of the ``tpcore`` command; without typer and rich it says how to get them."""

from __future__ import annotations

import sys

from ..errors import extra


def main() -> None:
    """Run the command line; without its extra say in one line how to get it and exit with 2."""
    try:
        with extra("cli", "the tpcore command"):
            from .app import app
    except ModuleNotFoundError as e:
        sys.stderr.write(f"{e}\n")
        sys.exit(2)
    app(prog_name="tpcore")
