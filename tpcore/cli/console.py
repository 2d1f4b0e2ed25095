"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

_WIDE = 1000


def wide_console() -> Console:
    """As wide as a terminal; for a file or a pipe so wide that no name is broken."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDE)
