"""What several commands share: how they print, and values of options."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import torch
import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

_WIDE = 1000
_MANY = 1000
"""Rows that rich sets in some seconds."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with all other characters escaped: names in files may have sequences that a terminal obeys."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def echo(text: object, *, err: bool = False) -> None:
    """Print a text, of one line or several."""
    typer.echo(printable(str(text), "\n\t"), err=err)


class _Printable(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(printable(c) if isinstance(c, str) else c for c in cells), **options)


def table_of(*titles: str, right: Collection[str] = ()) -> Table:
    """An empty table; columns in ``right`` have numbers, which stand at the right and are not broken."""
    table = _Printable(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title in right else "left", no_wrap=title in right)
    return table


def show(*parts: str | Table) -> None:
    """Print texts as they are, so that a command line in them can be copied, and tables as wide as the terminal: for a
    file or a pipe, or of many rows, so wide that no name is broken."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDE)
    for part in parts:
        if isinstance(part, Table) and part.row_count > _MANY:
            rows = [*zip(*([str(column.header), *map(str, column.cells)] for column in part.columns), strict=True)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            echo("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
        elif isinstance(part, Table):
            console.print(part)
        else:
            echo(part)


def working(text: str) -> Status:
    """A line on stderr for as long as the block lasts, where that is a terminal; its ``update`` takes another text."""
    return Console(stderr=True).status(text)


def tell(document: Any, as_json: bool, *parts: str | Table) -> None:
    """Print ``document`` as JSON for programs, or ``parts`` for people."""
    show(*((json.dumps(document, indent=2),) if as_json else parts))


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"torch has no floating dtype {name!r}")
    return dtype


def numbers_of(option: str, text: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, as 0,3, not {text!r}") from None


def bytes_of(option: str, text: str, *, unit: bool = False) -> int:
    """``unit``: it has to be named."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.upper())
    if (
        match is None
        or (unit and not match[2])
        or not (size := int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " ")))
    ):
        raise ValueError(f"{option} {text}: a size such as 5GB or 500MB")
    return size
