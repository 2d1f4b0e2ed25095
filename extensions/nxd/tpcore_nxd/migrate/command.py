"""``tpcore migrate``: what changes in scripts that were written for other libraries."""

from __future__ import annotations

import io
import tokenize
from dataclasses import asdict
from difflib import unified_diff
from pathlib import Path

import typer

from tpcore.cli.console import echo, printable, tell
from tpcore.errors import counted

from .script import Script


def migrate(
    paths: list[Path] = typer.Argument(help="Scripts, and directories whose Python files are read."),
    write: bool = typer.Option(False, "--write", help="Rewrite imports and devices in place."),
    diff: bool = typer.Option(False, "--diff", help="Print what --write changes, as a diff that patch takes."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Show what changes in scripts for other libraries.

    For NeuronX Distributed, optimum-neuron, Megatron and fairscale. Nothing is run. --write rewrites imports, and
    devices of xla; all else stays byte for byte. Exit status 1 while there is work for hands: something has no
    counterpart, an import of an old library stays, a device of xla, a call that raises, a file that is no Python.

    \b
    Examples:
      tpcore migrate train.py
      tpcore migrate scripts --diff | patch -p0

    Docs: docs/migrating-from-nxd.md
    """
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}")
        if path.suffix == ".ipynb":  # JSON, which reads as Python without imports
            raise ValueError(f"{path} is a notebook: `jupyter nbconvert --to script` makes a script of it")
    scripts = [(file, path) for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    if not scripts:
        raise ValueError(f"no Python file (.py) is in {', '.join(map(str, paths))}")
    found: dict[str, Script] = {}
    changed = unread = 0
    for file, path in scripts:
        inside = file.relative_to(path).parts
        if any(part.startswith(".") or part == "site-packages" for part in inside):
            continue
        script, encoding = _read(file)
        unread += script is None
        if script is None or not script.findings:
            continue
        found[str(file)] = script
        new = script.rewritten()
        if new != script.text:
            changed += 1
            if diff:
                lines = script.text.splitlines(keepends=True), new.splitlines(keepends=True)
                typer.echo(printable("".join(unified_diff(*lines, str(file), str(file))), "\n\t\r"), nl=False)
            if write:
                file.write_bytes(new.encode(encoding))
    _tell(found, f"{changed} {'rewritten' if write else 'to rewrite with --write'}", diff, as_json)
    if unread:
        raise typer.Exit(1)


def _tell(found: dict[str, Script], changed: str, quiet: bool, as_json: bool) -> None:
    """The findings, unless a diff was printed, and what is left to do. Exit status 1 where something is."""
    findings = [(file, finding) for file, script in found.items() for finding in script.findings]
    gone = sum(finding.new is None for _, finding in findings)
    stays, by_hand = (sum(getattr(s, what) for s in found.values()) for what in ("stays", "by_hand"))
    lines = []
    for file, finding in findings:
        lines.append(f"{file}:{finding.line}: {finding.old} -> {finding.new or 'nothing here'}")
        lines += [f"    {finding.note}"] if finding.note else []
    summary = [
        f"{counted(len(found), 'file')} with findings, of {changed}, {counted(gone, 'name')} without counterpart"
    ]
    if stays:
        summary.append(f"to change by hand: {counted(stays, 'import')} of other libraries")
    if by_hand:
        summary.append(
            f"to change by hand: {counted(by_hand, 'use')} of xla devices and groups, of names in other modules, or "
            "calls that raise"
        )
    if quiet:
        echo("\n".join(summary), err=True)
    else:
        counts = {"without_counterpart": gone, "imports_that_stay": stays, "by_hand": by_hand}
        tell({"findings": [{"file": f, **asdict(of)} for f, of in findings], **counts}, as_json, *lines, *summary)
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
