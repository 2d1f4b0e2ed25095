"""``tpcore plan``: which mesh, before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tpcore.cli.console import PICTURES, Table, bytes_of, check_target, dtype_of, echo, tell, working
from tpcore.errors import counted, extra
from tpcore_explain.summary import save_pictures, size
from tpcore_explain.target import told

from .execution import RECOMPUTED, Execution
from .published import PUBLISHED

if TYPE_CHECKING:  # a model's rooms take long to import
    from .search import MeshPlan


def plan_mesh(
    target: str = typer.Argument(help="As of tpcore explain: a Hugging Face config.json, say."),
    machine: str = typer.Option("h100x8", help=f"{', '.join(PUBLISHED)}, or a machine's file."),
    hosts: int = typer.Option(1, min=1, help="Hosts of that machine."),
    devices: int | None = typer.Option(None, min=1, help="Devices. Default: all of the hosts."),
    per_host: int | None = typer.Option(None, min=1, help="Devices of a host, if not the machine's."),
    memory: str | None = typer.Option(None, help="Of a device, as 16GB, if not the machine's."),
    batch: int = typer.Option(256, "--batch", "--batch-size", min=1, help="Examples of a step, over all devices."),
    seq_len: int = typer.Option(2048, min=1, help="Tokens of an example."),
    dtype: str = typer.Option("bfloat16", help="Of parameters and activations."),
    capacity_factor: float | None = typer.Option(None, min=0, help="Of experts: how much of an even share each takes."),
    interleaved: int | None = typer.Option(
        None, min=1, help="Another program's: stages of a device, one forward one back."
    ),
    recompute: str | None = typer.Option(None, help=f"Another program's: {', '.join(RECOMPUTED)}."),
    overlap: str | None = typer.Option(None, help="Another program's: axes with collectives beside compute: dp,tp."),
    fused: bool = typer.Option(False, help="Another program's: compiled kernels."),
    fsdp: bool = typer.Option(False, help="Another program's: parameters and gradients sharded over dp."),
    everything: bool = typer.Option(False, "--all", help="Show all plans that fit, and the parts of time and memory."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON, for programs."),
    plot: Path | None = typer.Option(None, help="Draw memory and time to this file: out.png, out.svg."),
    html: Path | None = typer.Option(None, help="Write a page to play with: devices, examples and tokens, by sliders."),
) -> None:
    """Predict time and memory on every mesh; show the fastest.

    Of a training step, on all meshes of the devices. Nothing is started. Exit status 1 if nothing fits, 2 if there is
    nothing to predict.

    \b
    Examples:
      tpcore plan config.json --machine h100x8 --hosts 4
      tpcore plan config.json --devices 16 --memory 16GB --batch 64
      tpcore plan config.json --html plan.html

    Docs: docs/plan.md
    """
    from .page import save_page
    from .search import plan

    check_target("--html", html, ".html")
    check_target("--plot", plot, *PICTURES)
    sizes: dict[str, Any] = {"hosts": hosts, "devices": devices, "per_host": per_host, "machine": machine}
    sizes |= {"batch": batch, "seq_len": seq_len, "dtype": dtype_of(dtype), "capacity_factor": capacity_factor}
    if any(option is not None for option in (interleaved, recompute, overlap)) or fused or fsdp:
        axes = tuple(axis.strip() for axis in overlap.split(",")) if overlap else ()
        sizes["execution"] = Execution(interleaved or 1, recompute or "nothing", axes, fused, fsdp)
    sizes["memory"] = None if memory is None else float(bytes_of("--memory", memory, unit=True))
    with told(), working("predicting steps on every mesh") as status:
        plans = plan(target, **sizes)
        if html is not None:
            save_page(html, plans, target, sizes, status.update)
    title = f"{plans.model} on {counted(plans.limits.devices, 'device')} of {plans.machine.name}"
    if plot is not None and plans.rows:
        rows = [{"mesh": str(row.choice), "memory": row.memory, "seconds": row.seconds} for row in plans.rows]
        with extra("plot", "--plot"):
            save_pictures(rows, plot, title=title, limit=plans.limits.memory)
        echo(f"saved as {plot}", err=as_json)
    if html is not None:
        echo(f"saved as {html}", err=as_json)
    tell(plans.to_json(), as_json, *_parts(plans, title, everything))
    raise typer.Exit(0 if plans.rows else 1)


def _parts(plans: MeshPlan, title: str, everything: bool) -> Iterator[str | Table]:
    limits = plans.limits
    step = f"{limits.batch} x {limits.seq_len} tokens a step, {str(limits.dtype).removeprefix('torch.')}"
    yield f"{title}, {size(limits.memory)} each: {step}. {counted(len(plans.rows), 'plan')} fit.\n"
    if plans.rows:
        yield from _tables(plans, everything)
        yield from _best_lines(plans)
    for why, count in sorted(plans.refused.items(), key=lambda item: -item[1])[:_BEST]:
        yield f"does not fit, {counted(count, 'time')}: {why}"
    if plans.machine.name in PUBLISHED:
        yield (
            "\nPredicted from published figures, not measured (tpcore plan --json names their sources). Not modelled: "
            "experts chosen unevenly; collectives beside compute and compilers that fuse, but by --overlap and --fused."
        )


_BEST = 10  # plans that are shown


def _tables(plans: MeshPlan, everything: bool) -> Iterator[Table | str]:
    """The best in five columns, for which a terminal of 80 has room; or all plans, and the parts of each."""
    rows = plans.rows if everything else plans.rows[:_BEST]
    numbers = "step", "tokens/s", "of peak", "memory"
    meshes = Table("mesh; microbatches", *numbers, right=numbers)
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.memory))
    memory, time = Table("memory of", *kinds, right=kinds), Table("time of", "in the step")
    for row in rows:
        cells = f"{row.step:.3g} s", f"{row.tokens_per_second:,.0f}", f"{row.efficiency:.0%}", size(row.nbytes)
        meshes.add_row(str(row.choice), *cells)
        memory.add_row(str(row.choice), *(size(row.memory[kind]) for kind in kinds))
        parts = sorted(row.seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{part} {value / row.step:.0%}" for part, value in parts if value >= 0.01 * row.step)
        time.add_row(str(row.choice), shares)
    yield meshes
    if everything:
        yield from ("", memory, "", time)


def _best_lines(plans: MeshPlan) -> Iterator[str]:
    from .choice import launch_line, setup_lines, step_lines

    choice, command = plans.best.choice, launch_line(plans.limits.devices, plans.machine.per_host)
    dtype = str(plans.limits.dtype).removeprefix("torch.")
    if choice.execution is None:
        yield f"\nThe first of them:\n\n    {command}\n"
        yield from (f"    {line}" for line in (*setup_lines(choice, dtype), "", *step_lines(choice)))
    if plans.cache is not None:
        fit = (plans.limits.memory - plans.best.memory["parameters"]) / plans.cache
        served = f"{size(plans.cache)} of keys and values on a device: {fit:,.0f} tokens fit beside its parameters"
        yield f"\nServed at tp={choice.ways.tp}, a token has {served}."
    yield ""
