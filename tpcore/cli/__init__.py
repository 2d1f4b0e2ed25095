"""The entry point of the ``tpcore`` command; the only module that may find typer and rich missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its extra say in one line how to get it and exit with 1."""
    try:
        from .app import app
    except ModuleNotFoundError as e:
        missing = (e.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"the tpcore command needs {missing}, which is not installed: pip install 'tpcore[cli]'")
    app(prog_name="tpcore")
