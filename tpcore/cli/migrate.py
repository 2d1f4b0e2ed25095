"""``tpcore migrate``: what changes in scripts that were written for other libraries."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import typer

from ..nxd.migrate.script import Script
from .console import echo


def migrate(
    path: Path = typer.Argument(help="A script, or a directory whose Python files are read."),
    write: bool = typer.Option(False, "--write", help="Rewrite the imports in place."),
) -> None:
    """Show what changes in scripts for NeuronX Distributed, optimum-neuron, Megatron or fairscale.

    Nothing is run. Imports that --write rewrites keep their formatting; calls are for you to change. Exits
    with 1 where something has no counterpart, or an import of an old library stays.
    """
    if not path.exists():
        raise typer.BadParameter(f"there is no {path}")
    if path.suffix == ".ipynb":  # JSON, which reads as Python without imports
        raise typer.BadParameter(f"{path} is a notebook: `jupyter nbconvert --to script` makes a script of it")
    scripts = [path] if path.is_file() else sorted(path.rglob("*.py"))
    files = changed = gone = stays = 0
    for file in scripts:
        inside = file.relative_to(path).parts
        if any(part.startswith(".") or part == "site-packages" for part in inside):
            continue
        try:
            data = file.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
            script = Script(text, str(file))
        except (SyntaxError, UnicodeDecodeError) as e:
            echo(f"{file}: not read, {type(e).__name__}: {e}", err=True)
            continue
        if not script.findings:
            continue
        files += 1
        stays += script.stays
        for finding in script.findings:
            gone += finding.new is None
            echo(f"{file}:{finding.line}: {finding.old} -> {finding.new or 'nothing here'}")
            if finding.note:
                echo(f"    {finding.note}")
        new = script.rewritten()
        if new != text:
            changed += 1
            if write:
                file.write_bytes(new.encode(encoding))
    done = "rewritten" if write else "to rewrite with --write"
    echo(f"{files} files with findings, imports of {changed} {done}, {gone} names without counterpart")
    if stays:
        echo(f"{stays} imports of other libraries stay: change them by hand")
    if gone or stays:
        raise typer.Exit(1)
