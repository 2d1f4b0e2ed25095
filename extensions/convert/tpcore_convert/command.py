"""``tpcore checkpoint ...``: checkpoints examined and rewritten on any machine, without a process group."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from tpcore.checkpoint.storage.files import Progress
from tpcore.cli.commands import Commands
from tpcore.cli.console import Table, bytes_of, echo, tell
from tpcore.errors import counted

checkpoint = typer.Typer(
    cls=Commands,
    help="""Examine, check, combine and reshard checkpoints.

    DIR is of any form that can be read.

    \b
    Examples:
      tpcore checkpoint inspect ckpt/step-100
      tpcore checkpoint consolidate ckpt/step-100 out

    Docs: docs/checkpoints.md
    """,
    no_args_is_help=True,
)

Src = Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint: a directory or an unsharded file.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="What to write, a folder. Nothing there is overwritten.")]
Key = Annotated[str, typer.Option("--model-key", help="The entry that holds the model's state.")]
_CUT = "How tensors are sharded where no record says so; STRIDE blocks if fused. Repeatable."
Cuts = Annotated[list[str] | None, typer.Option("--cut", metavar="PATTERN=DIM[:STRIDE]", help=_CUT)]
Trust = Annotated[bool, typer.Option("--trust/--no-trust", help="Whether to read pickles (.pt, .bin).")]
_FILES = ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json"
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _reading(model_key: str, cut: list[str] | None, trust: bool) -> dict[str, Any]:
    """The arguments ``rules`` and ``how`` of the offline functions."""
    from tpcore.checkpoint.forms.source import Reading
    from tpcore.checkpoint.read.source import ShardRule

    rules = []
    for text in cut or ():
        match = re.fullmatch(r"(.+)=(\d+)(?::(\d+))?", text)
        if match is None or match[3] == "0":
            raise ValueError(f"--cut {text}: PATTERN=DIM or PATTERN=DIM:STRIDE")
        rules.append(ShardRule(match[1], int(match[2]), int(match[3] or 1)))
    return {"rules": rules, "how": Reading(model_key, trust)}


def _check_out(out: str, *, file: bool = False) -> None:
    """ValueError, before any work, if ``out`` is the name of a file and a folder is written, or below a file. ``file``:
    one of safetensors is written too."""
    path = Path(out)
    if path.suffix in _FILES and not (file and out.endswith(".safetensors")):
        alone = f"{path.with_suffix('.safetensors')}, or for a folder " if file else ""
        raise ValueError(f"{out} is the name of a file, and a folder is written: give {alone}{path.with_suffix('')}")
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{out}: {place} is there already, a file: give another name")


@checkpoint.command()
def consolidate(
    src: Src,
    out: Out,
    output_format: Annotated[str, typer.Option("--format", "-f", help="safetensors or pytorch.")] = "safetensors",
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of each of several files: 5GB, say.")] = "",
    config: Annotated[str, typer.Option("--config", help="A config.json or its folder, whose names to write.")] = "",
    adapter: Annotated[str, typer.Option("--adapter", help="An adapter_config.json or its folder: peft's files.")] = "",
    model_key: Key = "model",
    cut: Cuts = None,
    trust: Trust = True,
    as_json: Json = False,
) -> None:
    """Write the whole model, as from_pretrained opens it.

    \b
    Examples:
      tpcore checkpoint consolidate ckpt/step-100 out --config path/to/model
      tpcore checkpoint consolidate ckpt/step-100 out --max-shard-size 5GB

    Docs: docs/checkpoints.md
    """
    from .rewrite import consolidate as consolidate_checkpoint

    reading = _reading(model_key, cut, trust)
    _check_out(out)
    if output_format not in ("safetensors", "pytorch"):
        raise ValueError(f"--format {output_format}: safetensors or pytorch")
    if adapter and (config or max_shard_size or output_format != "safetensors"):
        raise ValueError("--adapter writes one adapter_model.safetensors: leave out the other options")
    with _reporting(as_json) as progress:
        if max_shard_size:
            reading["max_shard_size"] = bytes_of("--max-shard-size", max_shard_size)
        if config or adapter:
            reading |= _named_by(config, adapter)
        pickled = output_format == "pytorch"
        names = consolidate_checkpoint(src, out, pickled=pickled, **reading, progress=progress)
    _wrote(out, names, as_json)


@checkpoint.command()
def reshard(
    src: Src,
    out: Out,
    tp: Annotated[int, typer.Option("--tp", "--tp-size", min=1, help="The degree to write for.")],
    strict: Annotated[bool, typer.Option("--strict/--no-strict", help="Refuse what is bound to its degree.")] = True,
    model_key: Key = "model",
    cut: Cuts = None,
    trust: Trust = True,
    as_json: Json = False,
) -> None:
    """Write a checkpoint for another degree, with optimizer state.

    \b
    Examples:
      tpcore checkpoint reshard ckpt/step-100 ckpt-tp4 --tp 4

    Docs: docs/checkpoints.md
    """
    from .inspect import inspect as inspect_checkpoint
    from .rewrite import reshard as reshard_checkpoint

    _check_out(out)
    reading = _reading(model_key, cut, trust)
    with _reporting(as_json) as progress:
        left_out = reshard_checkpoint(src, out, tp, strict=strict, **reading, progress=progress)
    report = f"{out}: for tp={tp}", *(f"left out: {why}" for why in left_out)
    tell({"out": out, "tp": tp, "left_out": left_out}, as_json, *report)
    before = {row.name for row in inspect_checkpoint(src, **reading).rows if row.padded}
    padded = [row.name for row in inspect_checkpoint(out).rows if row.padded and row.name not in before]
    if padded and not as_json:
        more = f" and {len(padded) - 3} more" if len(padded) > 3 else ""
        echo(
            f"warning: tp={tp} does not divide {', '.join(padded[:3])}{more}: only layers with pad=True fit that",
            err=True,
        )


@checkpoint.command()
def convert(
    src: Src, out: Out, model_key: Key = "model", cut: Cuts = None, trust: Trust = True, as_json: Json = False
) -> None:
    """Make safetensors of pickles.

    Of an unsharded file a file, of another library's shards a checkpoint.

    \b
    Examples:
      tpcore checkpoint convert pytorch_model.bin model.safetensors
      tpcore checkpoint convert megatron-run/iter_0000100 ckpt

    Docs: docs/checkpoints.md
    """
    from .rewrite import convert as convert_checkpoint

    _check_out(out, file=True)
    reading = _reading(model_key, cut, trust)
    with _reporting(as_json) as progress:
        names = convert_checkpoint(src, out, **reading, progress=progress)
    _wrote(out, names, as_json)


@checkpoint.command("inspect")
def inspect_(src: Src, model_key: Key = "model", cut: Cuts = None, trust: Trust = True, as_json: Json = False) -> None:
    """List the tensors, how they are sharded, and their shapes.

    \b
    Examples:
      tpcore checkpoint inspect ckpt/step-100
      tpcore checkpoint inspect model.safetensors --json

    Docs: docs/checkpoints.md
    """
    from .inspect import inspect as inspect_checkpoint

    reading = _reading(model_key, cut, trust)
    with _reporting(True):
        inspected = inspect_checkpoint(src, **reading)
    total = sum(row.bytes for row in inspected.rows)
    table = Table("name", "shape", "dtype", "sharding", "on each rank", "bytes", right=("bytes",))
    for row in inspected.rows:
        shape, local = ("x".join(map(str, dims)) or "scalar" for dims in (row.shape, row.local))
        table.add_row(row.name, shape, row.dtype, row.cut, local, f"{row.bytes:,}")
    stages = f", pp={inspected.pp}" if inspected.pp > 1 else ""
    summary = f"{inspected.form}, tp={inspected.tp}{stages}: {counted(len(inspected.rows), 'tensor')}, {total:,} bytes"
    entries = {**inspected._asdict(), "rows": [row._asdict() for row in inspected.rows], "bytes": total}
    tell(entries, as_json, table, summary)


@checkpoint.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as DIR of inspect.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    model_key: Key = "model",
    cut: Cuts = None,
    trust: Trust = True,
    as_json: Json = False,
) -> None:
    """Compare the models in two checkpoints.

    Of any form and degree. Exit status 1 if they differ.

    \b
    Examples:
      tpcore checkpoint diff ckpt/step-100 ckpt/step-200
      tpcore checkpoint diff ckpt/step-100 model.safetensors --json

    Docs: docs/checkpoints.md
    """
    from .inspect import diff as diff_checkpoint

    reading = _reading(model_key, cut, trust)
    with _reporting(as_json) as progress:
        differences = list(diff_checkpoint(a, b, **reading, progress=progress))
    rows = [  # with text in place of infinity and NaN, which JSON lacks
        {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in d._asdict().items()} for d in differences
    ]
    table = Table("name", "difference", "max absolute", "max relative")
    for d in differences:
        kind = d.why is not None and not d.absolute
        amounts = ("", "") if kind else (f"{d.absolute:.3g}", f"{d.relative:.3g}")
        table.add_row(d.name, d.why or "values", *amounts)
    tell(rows, as_json, table if differences else "the same")
    raise typer.Exit(1 if differences else 0)


@checkpoint.command()
def verify(src: Src, model_key: Key = "model", cut: Cuts = None, trust: Trust = True, as_json: Json = False) -> None:
    """Compare all checksums; look for missing and surplus files.

    Exit status 1 if anything is wrong.

    \b
    Examples:
      tpcore checkpoint verify ckpt/step-100

    Docs: docs/checkpoints.md
    """
    from .inspect import verify as verify_checkpoint
    from .inspect import without_checksums

    if not Path(src).exists():
        raise ValueError(f"{src} does not exist")
    reading = _reading(model_key, cut, trust)
    with _reporting(as_json) as progress:
        problems = verify_checkpoint(src, **reading, progress=progress)
    bare = without_checksums(src)
    sound = f"complete; without checksums, so that flipped bits do not show: {', '.join(bare)}"
    said = problems or [f"{src}: {sound if bare else 'complete and undamaged'}"]
    tell({"path": src, "problems": problems, "without_checksums": bare}, as_json, *said)
    raise typer.Exit(1 if problems else 0)


@contextmanager
def _reporting(quiet: bool) -> Iterator[Progress]:
    """A progress bar on a terminal, and warnings in one line on stderr."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    visible = not quiet and console.is_terminal
    collecting = gc.isenabled()
    gc.disable()  # which looks at all tensors again and again, and a command keeps them until its end
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not visible)
    try:
        with bar, warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: echo(f"warning: {message}", err=True)
            task = bar.add_task("done", total=None)
            yield Progress(lambda done, total: bar.update(task, completed=done, total=total))
    finally:
        if collecting:
            gc.enable()


def _named_by(config: str, adapter: str) -> dict[str, Any]:
    """For ``consolidate``: names as transformers or peft stores what a configuration is of, which is copied too."""
    from tpcore_hf.load.names import adapter_tensors, stored_tensors

    config_path = adapter or config
    folder = config_path if Path(config_path).is_dir() else str(Path(config_path).parent)
    tensors = adapter_tensors if adapter else stored_tensors
    return {"stored_as": partial(tensors, config_path), "beside": folder, "adapter": bool(adapter)}


def _wrote(out: str, names: list[str], as_json: bool) -> None:
    paths = (str(Path(out) / name) if Path(out).is_dir() else out for name in names)
    tell({"out": out, "files": names}, as_json, *paths)
