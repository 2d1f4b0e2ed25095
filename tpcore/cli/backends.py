"""``tpcore backends``: which backends are installed, who brought them, and whether they run here."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from ..backend import registry


def backends(
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list for programs."),
) -> None:
    """List the installed backends: which can run on this machine, and what carries their collectives."""
    found = registry.backends()
    if as_json:
        typer.echo(json.dumps([asdict(info) for info in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("backend", "from", "usable here", "group sizes", "traces"):
        table.add_column(title, overflow="fold")
    for info in found:
        usable = "yes" if info.usable else "no, see below"
        table.add_row(info.name, f"{info.distribution} {info.version}", usable, *_can(info))
    console = Console(highlight=False)
    console.print(table)
    for info in found:
        if text := info.remark if info.usable else info.reason:
            # outside the table and unwrapped: reasons hold command lines to copy; no markup: tpcore[neuron]
            console.print(f"\n{info.name}: {text}", markup=False, soft_wrap=True)


def _can(info: registry.BackendInfo) -> tuple[str, str]:
    if not info.capabilities:
        return "?", "?"
    sizes = info.capabilities["group_sizes"]
    return (
        "any" if sizes is None else ", ".join(map(str, sizes)),
        "yes" if info.capabilities["tracing"] else "no",
    )
