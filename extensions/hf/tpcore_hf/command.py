"""``tpcore export``: whether an engine takes a model's folder, said before a machine is rented for it."""

from __future__ import annotations

from pathlib import Path

import typer

from tpcore.cli.console import echo, table_of, tell
from tpcore.errors import CheckpointError, extra


def export(
    folder: Path = typer.Argument(help="A model, or an adapter, as save_pretrained writes it."),
    engine: str = typer.Option("vllm", "--for", help="vllm, sglang or transformers."),
    tp: int = typer.Option(1, "--tp", min=1, help="Ranks that the engine will have."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Say whether an engine takes the files of FOLDER, and what to do where it does not. Nothing is written.

    Exit status 1 if it does not; 2 if there is no model to look at.
    """
    with extra("hf", "tpcore export"):
        from .engines.check import findings
        from .engines.engine import engines
        from .engines.handover import LEVELS
    if engine not in (known := [*engines(), "transformers"]):
        raise typer.BadParameter(f"--for {engine}: there are {', '.join(known)}")
    wanted = engines().get(engine)
    try:
        found = findings(folder, wanted, tp)
    except (CheckpointError, ValueError, OSError) as e:
        echo(f"error: {e}", err=True)
        raise typer.Exit(2) from e
    taken = all(finding.level != LEVELS[0] for finding in found)
    table = table_of("", "about", "finding", "remedy")
    for finding in sorted(found, key=lambda finding: LEVELS.index(finding.level)):
        table.add_row(finding.level, finding.subject, finding.text, finding.remedy)
    verdict = f"{wanted or engine} {'takes' if taken else 'does not take'} {folder}"
    document = {"folder": str(folder), "engine": str(wanted or engine), "tp": tp, "takes": taken}
    tell({**document, "findings": [f._asdict() for f in found]}, as_json, *([table] if found else []), verdict)
    raise typer.Exit(0 if taken else 1)
