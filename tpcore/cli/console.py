"""The console that tables are printed on, and text for their cells."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_WIDE = 1000


def wide_console() -> Console:
    """A console as wide as the terminal. For a file or a pipe it is so wide that no name is broken."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` with text in place of infinity and NaN, which JSON lacks."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in entry.items()}
