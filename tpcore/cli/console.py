"""The console that tables are printed on, and text for their cells."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDE = 1000


def wide_console() -> Console:
    """A console as wide as the terminal. For a file or a pipe it is so wide that no name is broken."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def table_of(*titles: str, right: Collection[str] = ()) -> Table:
    """An empty table; columns in ``right`` have their text at the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title in right else "left")
    return table


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` with text in place of infinity and NaN, which JSON lacks."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in entry.items()}
