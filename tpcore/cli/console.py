"""Where tables are printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_WIDE = 1000


def wide_console() -> Console:
    """As wide as a terminal; for a file or a pipe so wide that no name is broken."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: text in its place."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in entry.items()}
