"""``tpcore explain``: what a training step of a model holds and sends, before anything is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from ..diagnose.explain import Collective, Explanation, Program, StageCost, explain
from ..diagnose.explain.summary import kinds, pattern, replicated, size, sizes
from ..errors import extra
from .arguments import dtype_of, numbers_of
from .console import table_of, wide_console


def explain_step(
    target: str = typer.Argument(
        ...,
        help="package.module:factory, path/to/file.py:factory, a directory with a Hugging Face config.json, "
        "that file, or a model class of transformers.",
    ),
    tp: int = typer.Option(1, min=1, help="Size of the tensor-parallel group."),
    dp: int = typer.Option(1, min=1, help="Size of the data-parallel group."),
    ep: int = typer.Option(1, min=1, help="Ranks that share the experts, with --plan; each has other examples."),
    cp: int = typer.Option(1, min=1, help="Ranks that share the tokens of an example."),
    pp: int = typer.Option(1, min=1, help="Pipeline stages, of a model with PipelinedLayers."),
    batch_size: int = typer.Option(1, min=1, help="Examples of one dp rank in a step."),
    seq_len: int = typer.Option(128, min=1, help="Tokens of an example."),
    parallelize: str | None = typer.Option(
        None, help="package.module:function or path/to/file.py:function that puts tpcore's layers into the model."
    ),
    plan: str | None = typer.Option(
        None,
        help="Cut a model of transformers as tpcore.parallelize does: auto, by its own plan; or a JSON file "
        "of rules that go before it. Default with --cp: auto.",
    ),
    sequence_parallel: bool = typer.Option(
        False, "--sequence-parallel", help="With --plan: each rank keeps some of the tokens."
    ),
    context_parallel: str | None = typer.Option(
        None, help="With --cp: how attention sees other ranks' tokens: gather, ulysses, ring, or auto, which says why."
    ),
    dispatch: str = typer.Option(
        "gathered", help="With --plan and --ep: how tokens come to experts: gathered, all_to_all or auto."
    ),
    capacity_factor: float | None = typer.Option(
        None, help="With --plan: how many times its even share of tokens an expert takes; others are dropped."
    ),
    dtype: str | None = typer.Option(None, help="Convert the parameters: bfloat16, say."),
    optimizer: str = typer.Option(
        "AdamW", help="A class of torch.optim; zero1: tpcore.Zero1 over AdamW; zero1:SGD: over another."
    ),
    master_dtype: str | None = typer.Option(None, help="Of zero1's master weights: float32, say."),
    max_norm: float = typer.Option(1.0, min=0, help="For gradient clipping; 0: do not clip."),
    ranks: str | None = typer.Option(
        None, help="Which ranks to record, as 0,3; default: all, of more than 16 the outermost."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON, for programs."),
    plot: Path | None = typer.Option(None, help="Draw it to this file: out.png, out.svg."),
) -> None:
    """Show what each rank holds, and every collective of a training step with the module that makes it.

    Nothing is started and no memory is used: the step runs on tensors without values. Exit status 1 if the
    ranks would disagree, and so hang, or take their parts for wholes; 2 if there is no step to show.
    """
    try:
        found = explain(
            target,
            tp=tp,
            dp=dp,
            ep=ep,
            cp=cp,
            pp=pp,
            batch_size=batch_size,
            seq_len=seq_len,
            parallelize=parallelize,
            plan=plan,
            sequence_parallel=sequence_parallel,
            context_parallel=context_parallel,
            dispatch=dispatch,
            capacity_factor=capacity_factor,
            dtype=None if dtype is None else dtype_of(dtype),
            optimizer=optimizer,
            master_dtype=None if master_dtype is None else dtype_of(master_dtype),
            max_norm=max_norm or None,
            ranks=None if ranks is None else numbers_of("--ranks", ranks),
        )
        if plot is not None:
            _draw(found, plot)
    except Exception as e:  # what the model raises too: there is no step to show
        where = "".join(f" ({note})" for note in getattr(e, "__notes__", []))
        kind = "" if isinstance(e, ValueError | ImportError) else f"{type(e).__name__}: "
        typer.echo(f"tpcore explain: {kind}{e}{where}", err=True)
        raise typer.Exit(2) from e
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _show(found)
    problems = [*found.mistakes, *([] if found.disagreement is None else [found.disagreement])]
    for problem in problems:
        typer.echo(f"\n{problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _draw(found: Explanation, path: Path) -> None:
    from ..diagnose.explain.picture import save_picture

    with extra("plot", "--plot"):
        save_picture(found, path)


def _show(found: Explanation) -> None:
    console = wide_console()
    for ranks, program in found.programs:
        axes = ", ".join(f"{axis}={n}" for axis, n in found.mesh.axes.items())
        alike = f"ranks {', '.join(map(str, ranks))} alike" if len(ranks) > 1 else f"rank {ranks[0]}"
        console.print(f"{program.model} on {axes}: {alike}\n", soft_wrap=True)
        console.print(_memory(program, staged=found.mesh.axes["pp"] > 1))
        for line in replicated(program, found.mesh.axes["tp"]):
            console.print(line, soft_wrap=True)
        idle = [p.name for p in program.parameters if not p.gradient]
        if idle:
            console.print(f"Without a gradient: {', '.join(idle[:8])}", soft_wrap=True)
        for name, route in dict.fromkeys((pattern(name), route) for name, route in program.routes):
            console.print(f"{name}: {route}", soft_wrap=True)
        for cost in program.pipelines:
            console.print(_stage(cost), soft_wrap=True)
        console.print()
        console.print(_traffic(program) if program.collectives else "No collectives.")
        console.print()


def _memory(program: Program, *, staged: bool) -> Table:
    numbers = ("elements", "parameters", "gradients", "optimizer", "together")
    table = table_of("on each rank", *numbers, right=numbers)
    cut = "cut, or of this stage" if staged else "cut over tp"
    rows = {cut: [p for p in program.parameters if p.cut]}
    rows["held in full"] = [p for p in program.parameters if not p.cut]
    rows["all"] = list(program.parameters)
    for name, some in rows.items():
        elements, *held = sizes(some)
        table.add_row(name, f"{elements:,}", *map(size, held), size(sum(held)))
    return table


def _stage(cost: StageCost) -> str:
    return (
        f"Stage {cost.stage} of {cost.stages}: {cost.name} {', '.join(cost.layers)}, {cost.microbatches} microbatches "
        f"of {size(cost.input_bytes)}; idle {cost.bubble:.0%} of the time; keeps {size(cost.kept)} of inputs for "
        f"backward, {size(cost.kept_lockstep)} with PipelineModel; sends {size(cost.sent)} to other stages"
    )


def _traffic(program: Program) -> Table:
    """One row for each kind, under the phase and the group; the sums over a group below."""
    table = table_of("collective", "bytes", "times", "sent", right=("bytes", "times", "sent"))
    above = ""
    for kind in kinds(program.collectives):
        call = kind.first
        title = f"{call.phase}, {_group(call)}"
        if title != above:
            table.add_row(title, style="bold")
            above = title
        what = f"  {call.op} of {call.dtype} {list(call.shape)}"
        line = os.path.basename(call.site.partition(" in ")[0])
        at = ", ".join(part for part in (kind.module, line) if part)
        row = (size(call.nbytes), str(kind.times), size(kind.sent))
        table.add_row(Text(f"{what}\n    {at}" if at else what), *row)
    for group in dict.fromkeys(map(_group, program.collectives)):
        some = [c for c in program.collectives if _group(c) == group]
        table.add_row(f"all over {group}", "", str(len(some)), size(sum(c.sent for c in some)), style="bold")
    return table


def _group(call: Collective) -> str:
    return f"{' x '.join(call.axes)} of {call.size}"
