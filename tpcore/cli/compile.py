"""``tpcore compile``: the programs of a training script, before it meets a device."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from ..backend.registry import backend_class
from ..errors import BackendError


def compile_ahead(
    command: list[str] = typer.Argument(..., help="What starts a rank: -- python train.py ..."),
    nprocs: int | None = typer.Option(None, "--nprocs", min=1, help="Ranks; default: as torchrun is told."),
    backend: str = typer.Option("neuron", "--backend", help="Whose programs."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list for programs."),
) -> None:
    """Run a script's graphs without a device, and list each distinct program that it needs compiled."""
    try:
        found = backend_class(backend).compile_ahead(command, nprocs)
    except BackendError as e:
        typer.echo(f"tpcore compile: {e}", err=True)
        raise typer.Exit(1) from e
    if as_json:
        typer.echo(json.dumps([asdict(info) for info in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("program", "runs", "operations", "parameters", "collectives", "at"):
        table.add_column(title, overflow="fold", justify="right" if title in ("runs", "operations") else "left")
    for info in found:
        site = os.path.relpath(info.site.partition(" in ")[0])
        size = f"{info.parameter_bytes / 1e6:.3g} MB"
        table.add_row(info.digest, str(info.runs), str(info.operations), size, info.collectives or "none", site)
    Console(highlight=False).print(table)
