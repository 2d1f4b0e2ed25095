"""``tpcore doctor``: what a report of a problem should say about this machine."""

from __future__ import annotations

import json

import typer

from ..diagnose import doctor as environment_report


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Print versions, backends, cores, memory, devices and network of this machine, and what would be chosen.

    For a report of a problem. Nothing is sent anywhere, and nothing is started.
    """
    found = environment_report.report()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for section, values in found.items():
        typer.echo(f"{section}:")
        for name, value in values.items():
            typer.echo(f"  {name}: {value}")
