"""What several commands share: how they print, and values of options."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Collection, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.status import Status

_NAME = 24
"""Columns that a word has for itself; a longer one is a name or a path, and goes on in the next line."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with all other characters escaped: names in files may have sequences that a terminal obeys."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def echo(text: object, *, err: bool = False) -> None:
    """Print a text, of one line or several."""
    typer.echo(printable(str(text), "\n\t"), err=err)


class Table:
    """Rows below titles. Columns in ``right`` have numbers, which stand at the right and are not broken."""

    def __init__(self, *titles: str, right: Collection[str] = ()) -> None:
        self._right = [title in right for title in titles]
        self._rows = [(titles, True)]

    def add_row(self, *cells: str, bold: bool = False) -> None:
        rest = [""] * (len(self._right) - len(cells))
        self._rows.append(((*(printable(cell) for cell in cells), *rest), bold))

    def lines(self, width: int | None) -> Iterator[str]:
        """As wide as ``width``, or, if None, so wide that nothing is broken."""
        widths = self._widths(width)
        for row, bold in self._rows:
            columns = [_broken(cell, at) for cell, at in zip(row, widths, strict=True)]
            for cells in zip_longest(*columns, fillvalue=""):
                each = zip(cells, widths, self._right, strict=True)
                line = "  ".join(cell.rjust(at) if right else cell.ljust(at) for cell, at, right in each).rstrip()
                yield typer.style(line, bold=True) if bold and line else line

    def _widths(self, width: int | None) -> list[int]:
        """What each column needs, and of the room that is left shares by what it wishes for."""
        columns = [*zip(*(row for row, _ in self._rows), strict=True)]
        whole = [max(map(len, column)) for column in columns]
        words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
        least = [a if right else min(w, _NAME) for a, w, right in zip(whole, words, self._right, strict=True)]
        wish = sum(whole) - sum(least)
        room = wish if width is None else max(0, width - 2 * (len(whole) - 1) - sum(least))
        if wish <= room:
            return whole
        return [low + room * (high - low) // wish for low, high in zip(least, whole, strict=True)]


def _broken(text: str, width: int) -> Iterator[str]:
    """Lines of at most ``width``: words, and of a longer one, a name, its parts up to a dot, a dash and their like."""
    line = ""
    for word in re.findall(r"\s*\S+", text):
        for part in [word] if len(word.strip()) <= width else re.findall(r"[^._/-]*[._/-]|[^._/-]+", word):
            if line and len(line) + len(part) > width:
                yield line
                line = part.lstrip()
            else:
                line += part
            while len(line) > width:
                yield line[:width]
                line = line[width:]
    yield line


def show(*parts: str | Table) -> None:
    """Print texts and tables as wide as the terminal, for a file or a pipe so wide that no name is broken. Lines of a
    text that begin with four spaces are to be copied, and stay as they are."""
    console = Console()
    width = console.width if console.is_terminal else None
    for part in parts:
        if isinstance(part, Table):
            typer.echo("\n".join(part.lines(width)), color=console.is_terminal)
        else:
            echo("\n".join(_wrapped(line, width) for line in part.split("\n")))


def _wrapped(line: str, width: int | None) -> str:
    if width is None or len(line) <= width or line.startswith("    "):
        return line
    return textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


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


PICTURES = ".png", ".svg", ".pdf"


def check_target(option: str, path: Path | None, *suffixes: str) -> None:
    """ValueError, before any work, if no file can be written at ``path``, or its name is one of another kind."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes or path.is_dir():
        raise ValueError(f"{option} {path}: name a file that ends in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}: make it, or give another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: there is no permission to write it: give another")
