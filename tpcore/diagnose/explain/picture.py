"""A program as a picture: what a rank holds, its collectives in the order of the step, and how it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import Explanation
from .step import Parameter, Program
from .summary import alike, size, sizes

_COLOURS = {"tp": "#3f51b5", "dp": "#ef6c00", "pp": "#00897b", "cp": "#8e24aa"}


def save_picture(found: Explanation, path: Path) -> None:
    """Draw the first program. The suffix of ``path`` chooses the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    _, program = found.programs[0]
    rows = [row for row in alike(program.parameters) if len(row[1].full) > 1 or row[1].cut]
    height = 0.6 + 0.2 * len(rows)
    figure = Figure(figsize=(11, 4.2 + height), layout="constrained")
    places = figure.subplot_mosaic(
        [["memory", "traffic"], ["cut", "cut"]], width_ratios=[1, 2.4], height_ratios=[4.2, height]
    )
    memory, traffic = places["memory"], places["traffic"]
    mesh = ", ".join(f"{axis}={n}" for axis, n in found.mesh.axes.items() if n > 1) or "one rank"
    figure.suptitle(f"{program.model}, {mesh}: one rank, one training step")
    _memory(memory, program)
    _traffic(traffic, program)
    _cut(places["cut"], rows)
    figure.savefig(path, dpi=130)


def _cut(axes: Any, rows: list[tuple[str, Parameter, int]]) -> None:
    """A box for each parameter, with this rank's part of it filled: a column of it, a row, or all."""
    axes.set(xlim=(0, 100), ylim=(len(rows), 0))
    axes.axis("off")
    axes.set_title("what a rank holds of each", fontsize=10, loc="left")
    for at, (name, p, times) in enumerate(rows):
        wide, high = (_share(p, dim) for dim in (1, 0))
        axes.add_patch(_box(1, at, 1, 1, "white"))
        axes.add_patch(_box(1, at, wide, high, _COLOURS["tp"] if p.cut else "#b0bec5"))
        which = "held in full" if not p.cut else f"cut along dim {1 if wide < 1 else 0}"
        count = f"  ({times} times)" if times > 1 else ""
        text = f"{name}{count}   {list(p.full)}: {which}, {list(p.shape)} here"
        axes.text(7, at + 0.45, text, fontsize=8, va="center", family="monospace")


def _share(p: Parameter, dim: int) -> float:
    """How much of a dim this rank has; padding counts to the whole."""
    if not p.cut or dim >= len(p.full):
        return 1.0
    return p.shape[dim] / max(p.full[dim], p.shape[dim])


def _box(x: float, row: int, wide: float, high: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, row + 0.1), 4.5 * wide, 0.8 * high, facecolor=colour, edgecolor="#455a64", linewidth=0.5)


def _memory(axes: Any, program: Program) -> None:
    bottom = [0, 0, 0]
    for cut, label, colour in ((True, "cut over tp", "#3f51b5"), (False, "held in full", "#b0bec5")):
        heights = sizes(p for p in program.parameters if p.cut is cut)[1:]
        names = ["parameters", "gradients", "optimizer"]
        bars = axes.bar(names, heights, bottom=bottom, color=colour, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.bar_label(bars, [size(b) for b in bottom])
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.margins(y=0.12)
    axes.set_title("memory", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _traffic(axes: Any, program: Program) -> None:
    calls = program.collectives
    for group, ranks in dict.fromkeys((c.axes, c.size) for c in calls):  # a group may be a part of its axes
        at = [i for i, c in enumerate(calls) if (c.axes, c.size) == (group, ranks)]
        total = size(sum(calls[i].sent for i in at))
        name = " x ".join(group)
        axes.vlines(at, 0, [calls[i].nbytes for i in at], color=_COLOURS.get(name, "#616161"), linewidth=2)
        axes.plot([], [], color=_COLOURS.get(name, "#616161"), linewidth=2, label=f"{name} of {ranks}: sends {total}")
    starts = [i for i, c in enumerate(calls) if i == 0 or calls[i - 1].phase != c.phase]
    for i in starts:
        axes.axvline(i - 0.5, color="#cfd8dc", linewidth=0.8)
        axes.text(i - 0.4, 1.01, calls[i].phase, transform=axes.get_xaxis_transform(), rotation=30, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("collectives, in order")
    axes.set_ylabel("bytes given")
    if calls:
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    else:
        axes.text(0.5, 0.5, "no collectives", transform=axes.transAxes, ha="center")
