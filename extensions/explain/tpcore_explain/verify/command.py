"""``tpcore verify``: is this backend right on this machine?"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from tpcore import settings
from tpcore.backend.registry import load_backend
from tpcore.cli.console import Table, check_target, echo, show, tell, working
from tpcore.processes.launch import launch
from tpcore.runtime.init import choose_backend

if TYPE_CHECKING:
    from .model import ModelVerdict
    from .report import Report

T = TypeVar("T")


def verify(
    script: Path | None = typer.Argument(
        None, help="A training script: run it by one process and by --ranks, and compare all that its modules compute."
    ),
    arguments: list[str] | None = typer.Argument(None, help="Of the script; after -- where they begin with a dash."),
    backend: str | None = typer.Option(None, help="A backend's name; default: the one tpcore.init chooses."),
    tp: int = typer.Option(2, min=1, help="Size of the tensor-parallel group."),
    save: Path | None = typer.Option(
        None, help="Where to save the result as JSON. Default, but of a script: tpcore-verify-BACKEND-tpN.json here."
    ),
    ranks: int = typer.Option(2, min=2, help="Of a script: how many it is written for."),
    steps: int = typer.Option(2, min=1, help="Of a script: how many steps of its optimizer to compare."),
    dtype: str | None = typer.Option(
        None,
        help="Of a script: float64, whatever it says; own: its types, as far as rounding explains; bits: "
        "its types, with no difference. Default: float64, or own on a device without that.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the table as JSON, and save it only with --save."),
    model: Path | None = typer.Option(
        None, help="A folder with the config.json of a transformers model: verify how that is sharded instead."
    ),
    sequence_parallel: bool = typer.Option(False, help="With --model: as of tpcore.parallelize."),
    expert_parallel: bool = typer.Option(False, help="With --model: as of tpcore.parallelize."),
    ep: int = typer.Option(1, min=1, help="With --model: ranks with other examples that share the experts."),
    dispatch: str = typer.Option("gathered", help="With --model and --ep: as of tpcore.parallelize."),
) -> None:
    """Compare a backend, or a model's shards, with one process.

    Layers, collectives, training steps, a checkpoint and a trace of a backend with the same on one CPU.
    With --model: output, loss and every gradient of a tiny copy of that model, sharded, with those of the whole.
    With a script: what its modules take and give, losses, gradients and steps; the first that differs is named.

    Under torchrun every rank runs it; otherwise it starts its own. Exit status 1 if anything is wrong.

    \b
    Examples:
      tpcore verify --backend cpu_gloo --tp 2
      tpcore verify train.py --ranks 2
      tpcore verify --model path/to/model --tp 2 --sequence-parallel

    Docs: docs/verify-script.md
    """
    check_target("--save", save, ".json")
    if script is not None:
        options = {"ranks": ranks, "steps": steps, "dtype": dtype}
        _verify_script(script, arguments or [], options, backend, save, as_json)
    # here: the other commands are spared all of it
    from .model import verify_model
    from .report import on_rank

    load_backend(choose_backend(backend))  # an error is said here once, before each rank says it
    first = not settings.WORLD_SIZE.is_set or settings.RANK.get() == 0
    if model is not None:
        if not (model / "config.json").is_file():
            raise ValueError(f"--model {model} has no config.json: name a folder of a transformers model")
        options = {"sequence_parallel": sequence_parallel, "expert_parallel": expert_parallel, "dispatch": dispatch}
        _tell(_on_ranks(verify_model, tp * ep, backend, tp, str(model), options, ep), first, as_json)
    report = _on_ranks(on_rank, tp, backend, tp)
    if first:
        show(report.to_json()) if as_json else _show(report)
        if save or not as_json:
            path = save or Path(f"tpcore-verify-{report.backend}-tp{tp}.json")
            path.write_text(report.to_json())
            echo(f"saved as {path}", err=as_json)
    raise typer.Exit(1 if report.wrong else 0)


def _on_ranks(check: Callable[..., T], ranks: int, *args: Any) -> T:
    """What ``check`` finds on this rank, where a launcher has started it, or on the first of new ones."""
    launched = settings.WORLD_SIZE.is_set
    with nullcontext() if launched and settings.RANK.get() else working("verifying"):
        return check(*args) if launched else launch(check, ranks, args=args)[0]


def _verify_script(
    script: Path, arguments: list[str], options: dict[str, Any], backend: str | None, save: Path | None, as_json: bool
) -> NoReturn:
    from .script.run import ScriptError, verify_script
    from .script.verdict import said

    try:
        if settings.WORLD_SIZE.is_set:
            raise ScriptError("it starts the ranks of a script by itself: run it without torchrun")
        env = {} if backend is None else {settings.BACKEND.name: backend}
        with working("verifying"):
            verdict = verify_script(script, arguments, **options, env=env)
    except ScriptError as e:
        echo(f"tpcore verify: {e}", err=True)
        raise typer.Exit(2) from e
    tell(asdict(verdict), as_json, said(verdict))
    if save is not None:
        save.write_text(json.dumps(asdict(verdict), indent=1) + "\n")
        echo(f"saved as {save}", err=as_json)
    raise typer.Exit(1 if verdict.first is not None else 0)


def _tell(verdict: ModelVerdict, first: bool, as_json: bool) -> NoReturn:
    if first and as_json:
        tell(asdict(verdict), as_json)
    elif first:
        show(*verdict.lines)
        if verdict.refused is not None:
            echo(f"tpcore verify: {verdict.refused}", err=True)
        if verdict.wrong is not None:
            echo(f"WRONG: {verdict.wrong}")
    raise typer.Exit(2 if verdict.refused is not None else 1 if verdict.wrong is not None else 0)


def _show(report: Report) -> None:
    table = Table("what", "dtype", "cases", "worst error", "allowed", "")
    for row in report.rows:
        figures = (f"{row.error:.1e}", f"{row.allowed:.1e}") if row.allowed else (f"{row.error:.3g}", "exact")
        table.add_row(row.what, row.dtype, str(row.cases), *figures, "WRONG" if row.wrong else "ok")
    show(table, *report.wrong[:20])
