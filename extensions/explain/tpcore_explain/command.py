"""``tpcore explain``: what a training step of a model holds and sends, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tpcore.cli.console import PICTURES, Table, check_target, dtype_of, echo, numbers_of, tell, working
from tpcore.errors import extra

from .explain import Collective, Explanation, Program, StageCost, explain
from .modules import pattern
from .summary import kinds, replicated, save_picture, size, sizes
from .target import told


def explain_step(
    target: str = typer.Argument(
        help="package.module:factory, path/to/file.py:factory, a Hugging Face config.json or its directory, or a model "
        "class of transformers."
    ),
    tp: int = typer.Option(1, min=1, help="Size of the tensor-parallel group."),
    dp: int = typer.Option(1, min=1, help="Size of the data-parallel group."),
    ep: int = typer.Option(1, min=1, help="Ranks that share the experts, with --plan; each has other examples."),
    cp: int = typer.Option(1, min=1, help="Ranks that share the tokens of an example."),
    pp: int = typer.Option(1, min=1, help="Pipeline stages, of a model with PipelinedLayers."),
    batch_size: int = typer.Option(1, "--batch", "--batch-size", min=1, help="Examples of one dp rank in a step."),
    seq_len: int = typer.Option(128, min=1, help="Tokens of an example."),
    parallelize: str | None = typer.Option(None, help="MODULE:FUNCTION or FILE.py:FUNCTION that replaces layers."),
    plan: str | None = typer.Option(
        None, help="Cut a model of transformers: auto, by its own plan; or by a JSON file of rules. With --cp: auto."
    ),
    sequence_parallel: bool = typer.Option(False, "--sequence-parallel", help="With --plan: ranks divide tokens."),
    context_parallel: str | None = typer.Option(None, help="With --cp: gather, ulysses, ring, or auto, with reasons."),
    dispatch: str = typer.Option("gathered", help="With --plan and --ep: gathered, all_to_all or auto."),
    capacity_factor: float | None = typer.Option(None, help="With --plan: times an expert's even share of tokens."),
    dtype: str | None = typer.Option(None, help="Convert the parameters: bfloat16, say."),
    optimizer: str = typer.Option("AdamW", help="A class of torch.optim; zero1: tpcore.Zero1 over AdamW; zero1:SGD."),
    master_dtype: str | None = typer.Option(None, help="Of zero1's master weights: float32, say."),
    max_norm: float = typer.Option(1.0, min=0, help="For gradient clipping; 0: do not clip."),
    ranks: str | None = typer.Option(None, help="To record, as 0,3; default: all, of more than 16 the outermost."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON, for programs."),
    plot: Path | None = typer.Option(None, help="Draw it to this file: out.png, out.svg."),
) -> None:
    """Show what each rank holds and sends in a training step.

    Every collective has the module that makes it. Nothing is started and no memory is used: the step runs on
    tensors without values. Exit status 1 if the ranks would disagree, and so hang, or take their parts for wholes;
    2 if there is no step to show.

    \b
    Examples:
      tpcore explain config.json --plan auto --tp 4 --dp 2
      tpcore explain train.py:build_model --tp 2 --seq-len 1024 --json

    Docs: docs/explain.md
    """
    options: dict[str, Any] = {name: value for name, value in locals().items() if name not in ("as_json", "plot")}
    check_target("--plot", plot, *PICTURES)
    options |= {name: dtype_of(options[name]) for name in ("dtype", "master_dtype") if options[name] is not None}
    options |= {"max_norm": max_norm or None, "ranks": None if ranks is None else numbers_of("--ranks", ranks)}
    with told(), working("recording a training step"):
        explanation = explain(**options)
    if plot is not None:
        with extra("plot", "--plot"):
            save_picture(explanation, plot)
        echo(f"saved as {plot}", err=as_json)
    tell(explanation.to_json(), as_json, *_parts(explanation))
    problems = [problem for problem in (*explanation.mistakes, explanation.disagreement) if problem is not None]
    for problem in problems:
        echo(f"\n{problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _parts(explanation: Explanation) -> Iterator[str | Table]:
    for ranks, program in explanation.programs:
        axes = ", ".join(f"{axis}={n}" for axis, n in explanation.mesh.axes.items())
        alike = f"ranks {', '.join(map(str, ranks))} alike" if len(ranks) > 1 else f"rank {ranks[0]}"
        yield f"{program.model} on {axes}: {alike}\n"
        yield _memory(program, staged=explanation.mesh.axes["pp"] > 1)
        yield from replicated(program, explanation.mesh.axes["tp"])
        idle = [p.name for p in program.parameters if not p.gradient]
        if idle:
            yield f"Without a gradient: {', '.join(idle[:8])}"
        yield from dict.fromkeys(f"{pattern(name)}: {route}" for name, route in program.routes)
        yield from map(_stage, program.pipelines)
        yield ""
        yield _traffic(program) if program.collectives else "No collectives."
        yield ""


def _memory(program: Program, *, staged: bool) -> Table:
    numbers = ("elements", "parameters", "gradients", "optimizer", "together")
    table = Table("on each rank", *numbers, right=numbers)
    cut = "cut, or of this stage" if staged else "cut over tp"
    for name, cuts in ((cut, (True,)), ("held in full", (False,)), ("all", (True, False))):
        elements, *nbytes = sizes(p for p in program.parameters if p.cut in cuts)
        table.add_row(name, f"{elements:,}", *map(size, nbytes), size(sum(nbytes)))
    return table


def _stage(cost: StageCost) -> str:
    return (
        f"Stage {cost.stage} of {cost.stages}: {cost.name} {', '.join(cost.layers)}, {cost.microbatches} microbatches "
        f"of {size(cost.input_bytes)}; idle {cost.bubble:.0%} of the time; keeps {size(cost.kept)} of inputs for "
        f"backward, {size(cost.kept_lockstep)} with PipelineModel; sends {size(cost.sent)} to other stages"
    )


def _traffic(program: Program) -> Table:
    """One row for each kind, under the phase and the group; the sums over a group below."""
    table = Table("collective", "bytes", "times", "sent", right=("bytes", "times", "sent"))
    above = ""
    for call, module, times in kinds(program.collectives):
        title = f"{call.phase}, {_group(call)}"
        if title != above:
            table.add_row(title, bold=True)
            above = title
        label = f"  {call.op} of {call.dtype} {list(call.shape)}"
        line = os.path.basename(call.site.partition(" in ")[0])
        at = ", ".join(part for part in (module, line) if part)
        row = size(call.nbytes), str(times), size(times * call.sent)
        table.add_row(label, *row)
        if at:
            table.add_row(f"    {at}")
    for group in dict.fromkeys(map(_group, program.collectives)):
        calls = [c for c in program.collectives if _group(c) == group]
        table.add_row(f"all over {group}", "", str(len(calls)), size(sum(c.sent for c in calls)), bold=True)
    return table


def _group(call: Collective) -> str:
    return f"{' x '.join(call.axes)} of {call.size}"
