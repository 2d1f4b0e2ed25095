"""``tpcore verify``: is this backend right on this machine?"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from ..launcher import launch


def verify(
    backend: str | None = typer.Option(None, help="A backend's name; default: the one tpcore.init chooses."),
    tp: int = typer.Option(2, min=1, help="Size of the tensor-parallel group."),
    save: Path | None = typer.Option(None, "--json", help="Write the table to this file as JSON."),
) -> None:
    """Compare layers, collectives, a training step and a checkpoint with the same on one CPU.

    Under torchrun every rank runs it; otherwise it starts its own. Exit status 1 if anything is wrong.
    """
    from ..testing.verify import on_rank

    if "WORLD_SIZE" in os.environ:
        rows, first = on_rank(backend, tp), os.environ.get("RANK", "0") == "0"
    else:
        rows, first = launch(on_rank, tp, args=(backend, tp))[0], True
    wrong = [message for row in rows for message in row.wrong]
    if first:
        table = Table(box=None, pad_edge=False)
        for title in ("what", "dtype", "cases", "worst error", "allowed", ""):
            table.add_column(title, overflow="fold")
        for row in rows:
            verdict = "WRONG" if row.wrong else "ok"
            figures = (f"{row.error:.1e}", f"{row.allowed:.1e}") if row.allowed else ("-", "-")
            table.add_row(row.what, row.dtype, str(row.cases), *figures, verdict)
        console = Console(highlight=False)
        console.print(table)
        for message in wrong[:20]:
            console.print(message, markup=False, soft_wrap=True)
        if save is not None:
            save.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    raise typer.Exit(1 if wrong else 0)
