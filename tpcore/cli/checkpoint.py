"""``tpcore checkpoint ...``: checkpoints examined and rewritten on any machine, without a process group."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from ..checkpoint.storage.files import Progress
from ..errors import CheckpointError
from .console import bytes_of, table_of, tell, wide_console

checkpoint = typer.Typer(
    help="Examine, check, combine and reshard checkpoints. DIR is of any form that can be read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Src = Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint: a directory or an unsharded file.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="What to write. Nothing there is overwritten.")]
_CUT = typer.Option(
    "--cut",
    metavar="PATTERN=DIM[:STRIDE]",
    help="How tensors are cut where no record says so; STRIDE blocks if fused. Repeatable.",
)


def _given(
    model_key: Annotated[str, typer.Option("--model-key", help="The entry that holds the model's state.")] = "model",
    cut: Annotated[list[str], _CUT] = [],  # noqa: B006  typer reads it
    trust: Annotated[bool, typer.Option("--trust/--no-trust", help="Whether to read pickles (.pt, .bin).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> tuple[dict[str, Any], bool]:
    """The arguments ``rules`` and ``how`` of the offline functions, and whether to print JSON."""
    from ..checkpoint.forms.source import Reading
    from ..checkpoint.read.source import CutRule

    rules = []
    for text in cut:
        match = re.fullmatch(r"(.+)=(\d+)(?::(\d+))?", text)
        if match is None or match[3] == "0":
            raise typer.BadParameter(f"--cut {text}: PATTERN=DIM or PATTERN=DIM:STRIDE")
        rules.append(CutRule(match[1], int(match[2]), int(match[3] or 1)))
    return {"rules": rules, "how": Reading(model_key, trust)}, as_json


def _reads(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the options of ``_given`` in place of its parameters ``reading`` and ``as_json``."""
    options = inspect.signature(_given, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def run(**arguments: Any) -> None:
        reading, as_json = _given(**{name: arguments.pop(name) for name in options})
        command(**arguments, reading=reading, as_json=as_json)

    kept = [p for p in own.parameters.values() if p.name not in ("reading", "as_json")]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*kept, *options.values())]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@checkpoint.command()
@_reads
def consolidate(
    src: Src,
    out: Out,
    output_format: Annotated[str, typer.Option("--format", "-f", help="safetensors or pytorch.")] = "safetensors",
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of each of several files: 5GB, say.")] = "",
    config: Annotated[str, typer.Option("--config", help="A config.json or its folder, whose names to write.")] = "",
    adapter: Annotated[str, typer.Option("--adapter", help="An adapter_config.json or its folder: peft's files.")] = "",
    *,
    reading: dict[str, Any],
    as_json: bool,
) -> None:
    """Write the whole model as one model.safetensors, which transformers' from_pretrained opens."""
    from ..checkpoint.rewrite import consolidate as consolidate_checkpoint

    if output_format not in ("safetensors", "pytorch"):
        raise typer.BadParameter(f"--format {output_format}: safetensors or pytorch")
    if adapter and (config or max_shard_size or output_format != "safetensors"):
        raise typer.BadParameter("--adapter writes one adapter_model.safetensors: leave out the other options")
    with _reporting(as_json) as progress:
        if max_shard_size:
            reading["max_shard_size"] = bytes_of("--max-shard-size", max_shard_size)
        if config or adapter:
            reading |= _named_by(config, adapter)
        pickled = output_format == "pytorch"
        names = consolidate_checkpoint(src, out, pickled=pickled, **reading, progress=progress)
    _wrote(out, names, as_json)


@checkpoint.command()
@_reads
def reshard(
    src: Src,
    out: Out,
    tp: Annotated[int, typer.Option("--tp", "--tp-size", min=1, help="The degree to write for.")],
    strict: Annotated[bool, typer.Option("--strict/--no-strict", help="Refuse what is bound to its degree.")] = True,
    *,
    reading: dict[str, Any],
    as_json: bool,
) -> None:
    """Write the checkpoint for another tensor-parallel degree, optimizer state included."""
    from ..checkpoint.inspect import inspect as inspect_checkpoint
    from ..checkpoint.rewrite import reshard as reshard_checkpoint

    with _reporting(as_json) as progress:
        left = reshard_checkpoint(src, out, tp, strict=strict, **reading, progress=progress)
    text = "\n".join((f"{out}: for tp={tp}", *(f"left out: {why}" for why in left)))
    tell({"out": out, "tp": tp, "left_out": left}, text, as_json)
    before = {row.name for row in inspect_checkpoint(src, **reading).rows if row.padded}
    padded = [row.name for row in inspect_checkpoint(out).rows if row.padded and row.name not in before]
    if padded and not as_json:
        more = f" and {len(padded) - 3} more" if len(padded) > 3 else ""
        typer.echo(
            f"warning: tp={tp} does not divide {', '.join(padded[:3])}{more}: only layers with pad=True fit that",
            err=True,
        )


@checkpoint.command()
@_reads
def convert(src: Src, out: Out, *, reading: dict[str, Any], as_json: bool) -> None:
    """Make safetensors of pickles: of an unsharded file a file, of another library's shards a checkpoint."""
    from ..checkpoint.rewrite import convert as convert_checkpoint

    with _reporting(as_json) as progress:
        names = convert_checkpoint(src, out, **reading, progress=progress)
    _wrote(out, names, as_json)


@checkpoint.command("inspect")
@_reads
def inspect_(src: Src, *, reading: dict[str, Any], as_json: bool) -> None:
    """List the tensors: logical shape, dtype, how it is cut, and the shape on each rank."""
    from ..checkpoint.inspect import inspect as inspect_checkpoint

    with _reporting(True):
        found = inspect_checkpoint(src, **reading)
    total = sum(row.bytes for row in found.rows)
    if as_json:
        tensors = [row._asdict() for row in found.rows]
        typer.echo(json.dumps({**found._asdict(), "rows": tensors, "bytes": total}, indent=2))
        return
    table = table_of("name", "shape", "dtype", "cut", "on each rank", "bytes", right=("bytes",))
    for row in found.rows:
        shape, local = ("x".join(map(str, dims)) or "scalar" for dims in (row.shape, row.local))
        table.add_row(row.name, shape, row.dtype, row.cut, local, f"{row.bytes:,}")
    wide_console().print(table)
    stages = f", pp={found.pp}" if found.pp > 1 else ""
    typer.echo(f"{found.form}, tp={found.tp}{stages}: {len(found.rows)} tensors, {total:,} bytes")


@checkpoint.command()
@_reads
def diff(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    *,
    reading: dict[str, Any],
    as_json: bool,
) -> None:
    """Compare the models in two checkpoints, of any form and degree. Exit status 1 if they differ."""
    from ..checkpoint.inspect import diff as diff_checkpoint

    with _reporting(as_json) as progress:
        found = list(diff_checkpoint(a, b, **reading, progress=progress))
    if as_json or not found:
        rows = [  # with text in place of infinity and NaN, which JSON lacks
            {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in d._asdict().items()} for d in found
        ]
        tell(rows, "the same", as_json)
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
def verify(src: Src, *, reading: dict[str, Any], as_json: bool) -> None:
    """Compare all checksums and look for missing and surplus files. Exit status 1 if anything is wrong."""
    from ..checkpoint.inspect import verify as verify_checkpoint

    with _reporting(as_json) as progress:
        wrong = verify_checkpoint(src, **reading, progress=progress)
    tell({"path": src, "problems": wrong}, "\n".join(wrong) or f"{src}: complete and undamaged", as_json)
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


def _named_by(config: str, adapter: str) -> dict[str, Any]:
    """For ``consolidate``: names as transformers or peft stores what a configuration is of, which is copied too."""
    from ..models.names import adapter_tensors, stored_tensors

    given = adapter or config
    folder = given if Path(given).is_dir() else str(Path(given).parent)
    tensors = adapter_tensors if adapter else stored_tensors
    return {"stored_as": partial(tensors, given), "beside": folder, "adapter": bool(adapter)}


def _wrote(out: str, names: list[str], as_json: bool) -> None:
    paths = (str(Path(out) / name) if Path(out).is_dir() else out for name in names)
    tell({"out": out, "files": names}, "\n".join(paths), as_json)
