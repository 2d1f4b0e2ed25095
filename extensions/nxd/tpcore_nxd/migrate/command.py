"""``tpcore migrate``: what changes in scripts that were written for other libraries."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import typer

from tpcore.cli.console import echo

from .script import Script


def migrate(
    path: Path = typer.Argument(help="A script, or a directory whose Python files are read."),
    write: bool = typer.Option(False, "--write", help="Rewrite the imports in place."),
) -> None:
    """Show what changes in scripts for other libraries.

    For NeuronX Distributed, optimum-neuron, Megatron and fairscale. Nothing is run. Imports that --write rewrites keep
    their formatting; calls are for you to change. Exit status 1 where something has no counterpart, an import of an
    old library stays, or a name of xla or of a module that has moved.

    \b
    Examples:
      tpcore migrate train.py
      tpcore migrate scripts --write

    Docs: docs/migrating-from-nxd.md
    """
    if not path.exists():
        raise ValueError(f"there is no {path}")
    if path.suffix == ".ipynb":  # JSON, which reads as Python without imports
        raise ValueError(f"{path} is a notebook: `jupyter nbconvert --to script` makes a script of it")
    scripts = [path] if path.is_file() else sorted(path.rglob("*.py"))
    files = changed = gone = stays = by_hand = 0
    for file in scripts:
        inside = file.relative_to(path).parts
        if any(part.startswith(".") or part == "site-packages" for part in inside):
            continue
        script, encoding = _read(file)
        if script is None or not script.findings:
            continue
        files += 1
        stays += script.stays
        by_hand += script.by_hand
        for finding in script.findings:
            gone += finding.new is None
            echo(f"{file}:{finding.line}: {finding.old} -> {finding.new or 'nothing here'}")
            if finding.note:
                echo(f"    {finding.note}")
        new = script.rewritten()
        if new != script.text:
            changed += 1
            if write:
                file.write_bytes(new.encode(encoding))
    done = "rewritten" if write else "to rewrite with --write"
    echo(f"{files} files with findings, imports of {changed} {done}, {gone} names without counterpart")
    if stays:
        echo(f"{stays} imports of other libraries stay: change them by hand")
    if by_hand:
        echo(f"{by_hand} uses of xla devices and groups, or of names in other modules, stay: change them by hand")
    if gone or stays or by_hand:
        raise typer.Exit(1)


def _read(file: Path) -> tuple[Script | None, str]:
    """The script and its encoding; None, with a line that says why, if it is none."""
    try:
        data = file.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Script(data.decode(encoding), str(file)), encoding
    except (SyntaxError, UnicodeDecodeError) as e:
        echo(f"{file}: not read, {type(e).__name__}: {e}", err=True)
        return None, ""
