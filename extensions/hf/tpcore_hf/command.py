"""``tpcore export``: whether an engine takes a model's folder, said before a machine is rented for it."""

from __future__ import annotations

from pathlib import Path

import typer

from tpcore.cli.console import Table, tell, working
from tpcore.errors import extra


def export(
    folder: Path = typer.Argument(help="A model, or an adapter, as save_pretrained writes it."),
    engine: str = typer.Option("vllm", "--for", help="vllm, sglang or transformers."),
    tp: int = typer.Option(1, "--tp", min=1, help="Ranks that the engine will have."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Say whether an engine takes the files of FOLDER.

    And what to do where it does not. Nothing is written. Exit status 1 if it does not; 2 if there is no model to
    look at.

    \b
    Examples:
      tpcore export path/to/model --for vllm --tp 2
      tpcore export path/to/adapter --for sglang --json

    Docs: docs/after-training.md
    """
    with extra("hf", "tpcore export"):
        from .engines.check import findings
        from .engines.handover import LEVELS, engines
    if engine not in (known := [*engines(), "transformers"]):
        raise ValueError(f"--for {engine}: there are {', '.join(known)}")
    wanted = engines().get(engine)
    with working("reading the files"):
        found = findings(folder, wanted, tp)
    taken = all(finding.level != LEVELS[0] for finding in found)
    table = Table("", "about", "finding", "remedy")
    for finding in sorted(found, key=lambda finding: LEVELS.index(finding.level)):
        table.add_row(finding.level, finding.subject, finding.text, finding.remedy)
    verdict = f"{wanted or engine} {'takes' if taken else 'does not take'} {folder}"
    document = {"folder": str(folder), "engine": str(wanted or engine), "tp": tp, "takes": taken}
    tell({**document, "findings": [f._asdict() for f in found]}, as_json, *([table] if found else []), verdict)
    raise typer.Exit(0 if taken else 1)
