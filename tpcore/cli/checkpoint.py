"""``tpcore checkpoint ...``: checkpoints examined and rewritten on any machine, without a process group."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from ..checkpoint.storage.files import Progress
from ..errors import CheckpointError
from .console import finite, shape_text, table_of, wide_console

checkpoint = typer.Typer(
    help="Examine, check, combine and reshard checkpoints. DIR is of any form that can be read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

Src = Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint: a directory or an unsharded file.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="What to write. Nothing there is overwritten.")]


@dataclass(frozen=True)
class Given:
    """The options that every command has, because each reads a checkpoint."""

    reading: dict[str, Any]
    """The arguments ``rules`` and ``how`` of the offline functions."""
    as_json: bool


def _given(
    model_key: Annotated[str, typer.Option("--model-key", help="The entry that holds the model's state.")] = "model",
    cut: Annotated[
        list[str],
        typer.Option(
            "--cut",
            metavar="PATTERN=DIM[:STRIDE]",
            help="How tensors are cut where no record says so; STRIDE blocks if fused. Repeatable.",
        ),
    ] = [],  # noqa: B006  typer reads it
    trust: Annotated[bool, typer.Option("--trust/--no-trust", help="Whether to read pickles (.pt, .bin).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> Given:
    from ..checkpoint.forms.source import Reading

    return Given({"rules": _rules(cut), "how": Reading(model_key, trust)}, as_json)


def _reads(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the options of ``_given`` in place of its parameter ``given``."""
    options = inspect.signature(_given, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def run(**arguments: Any) -> None:
        given = _given(**{name: arguments.pop(name) for name in options})
        command(**arguments, given=given)

    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "given"]
    shared = [p.replace(kind=p.KEYWORD_ONLY) for p in options.values()]
    run.__signature__ = own.replace(parameters=[*kept, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*kept, *shared)}
    return run


@checkpoint.command()
@_reads
def consolidate(
    src: Src,
    out: Out,
    output_format: Annotated[str, typer.Option("--format", "-f", help="safetensors or pytorch.")] = "safetensors",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Several files of at most this size, such as 5GB.")
    ] = "",
    config: Annotated[
        str, typer.Option("--config", help="A config.json or its folder: write the names of its files.")
    ] = "",
    adapter: Annotated[
        str, typer.Option("--adapter", help="An adapter_config.json or its folder: write peft's files alone.")
    ] = "",
    *,
    given: Given,
) -> None:
    """Write the whole model as one model.safetensors, which transformers' from_pretrained opens."""
    from ..checkpoint.rewrite import consolidate as consolidate_checkpoint

    if output_format not in ("safetensors", "pytorch"):
        raise typer.BadParameter(f"--format {output_format}: safetensors or pytorch")
    if adapter and (config or max_shard_size or output_format != "safetensors"):
        raise typer.BadParameter("--adapter writes one adapter_model.safetensors: leave out the other options")
    size = _bytes(max_shard_size) if max_shard_size else None
    with _reporting(given.as_json) as progress:
        names = consolidate_checkpoint(
            src,
            out,
            pickled=output_format == "pytorch",
            max_shard_size=size,
            **given.reading,
            progress=progress,
            **(_named_by(config, adapter) if config or adapter else {}),
        )
    _wrote(out, names, given.as_json)


@checkpoint.command()
@_reads
def reshard(
    src: Src,
    out: Out,
    tp: Annotated[int, typer.Option("--tp", "--tp-size", min=1, help="The degree to write for.")],
    strict: Annotated[
        bool, typer.Option("--strict/--no-strict", help="Whether to leave out what is bound to its degree.")
    ] = True,
    *,
    given: Given,
) -> None:
    """Write the checkpoint for another tensor-parallel degree, optimizer state included."""
    from ..checkpoint.inspect import padded_names
    from ..checkpoint.rewrite import reshard as reshard_checkpoint

    with _reporting(given.as_json) as progress:
        left = reshard_checkpoint(src, out, tp, strict=strict, **given.reading, progress=progress)
    if given.as_json:
        typer.echo(json.dumps({"out": out, "tp": tp, "left_out": left}, indent=2))
    else:
        typer.echo(f"{out}: for tp={tp}" + "".join(f"\nleft out: {why}" for why in left))
    before = set(padded_names(src, **given.reading))
    padded = [name for name in padded_names(out, **given.reading) if name not in before]
    if padded and not given.as_json:
        more = f" and {len(padded) - 3} more" if len(padded) > 3 else ""
        typer.echo(
            f"warning: tp={tp} does not divide {', '.join(padded[:3])}{more}: only layers with pad=True fit that",
            err=True,
        )


@checkpoint.command()
@_reads
def convert(src: Src, out: Out, *, given: Given) -> None:
    """Make safetensors of pickles: of an unsharded file a file, of another library's shards a checkpoint."""
    from ..checkpoint.rewrite import convert as convert_checkpoint

    with _reporting(given.as_json) as progress:
        names = convert_checkpoint(src, out, **given.reading, progress=progress)
    _wrote(out, names, given.as_json)


@checkpoint.command("inspect")
@_reads
def inspect_(src: Src, *, given: Given) -> None:
    """List the tensors: logical shape, dtype, how it is cut, and the shape on each rank."""
    from ..checkpoint.inspect import inspect as inspect_checkpoint

    with _reporting(True):
        found = inspect_checkpoint(src, **given.reading)
    total = sum(row.bytes for row in found.rows)
    if given.as_json:
        tensors = [row._asdict() for row in found.rows]
        typer.echo(json.dumps({**found._asdict(), "rows": tensors, "bytes": total}, indent=2))
        return
    table = table_of("name", "shape", "dtype", "cut", "on each rank", "bytes", right=("bytes",))
    for row in found.rows:
        sizes = shape_text(row.shape), row.dtype, row.cut, shape_text(row.local)
        table.add_row(row.name, *sizes, f"{row.bytes:,}")
    wide_console().print(table)
    stages = f", pp={found.pp}" if found.pp > 1 else ""
    typer.echo(f"{found.form}, tp={found.tp}{stages}: {len(found.rows)} tensors, {total:,} bytes")


@checkpoint.command()
@_reads
def diff(
    a: Annotated[str, typer.Argument(metavar="A")], b: Annotated[str, typer.Argument(metavar="B")], *, given: Given
) -> None:
    """Compare the models in two checkpoints, of any form and degree. Exit status 1 if they differ."""
    from ..checkpoint.inspect import diff as diff_checkpoint

    with _reporting(given.as_json) as progress:
        found = list(diff_checkpoint(a, b, **given.reading, progress=progress))
    if given.as_json:
        typer.echo(json.dumps([finite(d._asdict()) for d in found], indent=2))
    elif not found:
        typer.echo("the same")
    else:
        table = table_of("name", "difference", "max absolute", "max relative")
        for d in found:
            kind = d.why is not None and not d.absolute
            amounts = ("", "") if kind else (f"{d.absolute:.3g}", f"{d.relative:.3g}")
            table.add_row(d.name, d.why or "values", *amounts)
        wide_console().print(table)
    raise typer.Exit(1 if found else 0)


@checkpoint.command()
@_reads
def verify(src: Src, *, given: Given) -> None:
    """Compare all checksums and look for missing and surplus files. Exit status 1 if anything is wrong."""
    from ..checkpoint.inspect import verify as verify_checkpoint

    with _reporting(given.as_json) as progress:
        wrong = verify_checkpoint(src, **given.reading, progress=progress)
    if given.as_json:
        typer.echo(json.dumps({"path": src, "problems": wrong}, indent=2))
    else:
        typer.echo("\n".join(wrong) or f"{src}: complete and undamaged")
    raise typer.Exit(1 if wrong else 0)


@contextmanager
def _reporting(quiet: bool) -> Iterator[Progress]:
    """A progress bar on a terminal; what is wrong with the input in one line on stderr, exit status 2."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    shown = not quiet and console.is_terminal
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown)
    try:
        with bar, warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
            task = bar.add_task("done", total=None)
            yield Progress(lambda done, total: bar.update(task, completed=done, total=total))
    except (CheckpointError, ValueError, OSError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(2) from e


def _rules(cuts: list[str]) -> list[Any]:
    from ..checkpoint.read.source import CutRule

    rules = []
    for text in cuts:
        match = re.fullmatch(r"(.+)=(\d+)(?::(\d+))?", text)
        if match is None or match[3] == "0":
            raise typer.BadParameter(f"--cut {text}: PATTERN=DIM or PATTERN=DIM:STRIDE")
        rules.append(CutRule(match[1], int(match[2]), int(match[3] or 1)))
    return rules


def _named_by(config: str, adapter: str) -> dict[str, Any]:
    """For ``consolidate``: names as transformers or peft stores what a configuration is of, which is copied too."""
    from ..models.names import adapter_tensors, stored_tensors

    given = adapter or config
    folder = given if Path(given).is_dir() else str(Path(given).parent)
    tensors = adapter_tensors if adapter else stored_tensors
    return {"stored_as": partial(tensors, given), "beside": folder, "adapter": bool(adapter)}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.upper())
    if match is None or not (size := int(float(match[1]) * _UNITS[match[2].rstrip("B") + "B"])):
        raise typer.BadParameter(f"--max-shard-size {text}: a size such as 5GB or 500MB")
    return size


def _wrote(out: str, names: list[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"out": out, "files": names}, indent=2))
    else:
        typer.echo("\n".join(str(Path(out) / name) if Path(out).is_dir() else out for name in names))
