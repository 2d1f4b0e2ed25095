"""``tpcore verify``: is this backend right on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from .. import settings
from ..backend.registry import load_backend
from ..errors import BackendError
from ..processes.launch import launch
from ..runtime.init import choose_backend

if TYPE_CHECKING:
    from ..testing.verify.report import Report


def verify(
    backend: str | None = typer.Option(None, help="A backend's name; default: the one tpcore.init chooses."),
    tp: int = typer.Option(2, min=1, help="Size of the tensor-parallel group."),
    save: Path | None = typer.Option(
        None, "--json", help="Where to save the table; default: tpcore-verify-BACKEND-tpN.json here."
    ),
) -> None:
    """Compare layers, collectives, training steps, a checkpoint and a trace with the same on one CPU.

    Under torchrun every rank runs it; otherwise it starts its own. Exit status 1 if anything is wrong.
    """
    from ..testing.verify.report import on_rank  # here: the other commands are spared all of it

    try:
        load_backend(choose_backend(backend))
    except BackendError as e:  # here once, before each rank says it
        typer.echo(f"tpcore verify: {e}", err=True)
        raise typer.Exit(2) from e
    if settings.WORLD_SIZE.is_set:
        report, first = on_rank(backend, tp), settings.RANK.get() == 0
    else:
        report, first = launch(on_rank, tp, args=(backend, tp))[0], True
    if first:
        _show(report)
        place = save or Path(f"tpcore-verify-{report.backend}-tp{tp}.json")
        place.write_text(report.to_json())
        typer.echo(f"saved as {place}")
    raise typer.Exit(1 if report.wrong else 0)


def _show(report: Report) -> None:
    from ..testing.verify.report import figures

    table = Table(box=None, pad_edge=False)
    for title in ("what", "dtype", "cases", "worst error", "allowed", ""):
        table.add_column(title, overflow="fold")
    for row in report.rows:
        table.add_row(row.what, row.dtype, str(row.cases), *figures(row), "WRONG" if row.wrong else "ok")
    console = Console(highlight=False)
    console.print(table)
    for message in report.wrong[:20]:
        console.print(message, markup=False, soft_wrap=True)
