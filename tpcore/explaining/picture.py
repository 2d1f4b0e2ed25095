"""A picture of a program: the memory of one rank, and its collectives in the order of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import Explanation
from .step import Program
from .summary import size, sizes

_COLOURS = {"tp": "#3f51b5", "dp": "#ef6c00", "pp": "#00897b"}


def save_picture(found: Explanation, path: Path) -> None:
    """Draw the first program. The suffix of ``path`` chooses the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    _, program = found.programs[0]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, traffic = figure.subplots(1, 2, width_ratios=[1, 2.4])
    mesh = ", ".join(f"{axis}={n}" for axis, n in found.mesh.axes.items() if n > 1) or "one rank"
    figure.suptitle(f"{program.model}, {mesh}: one rank, one training step")
    _memory(memory, program)
    _traffic(traffic, program)
    figure.savefig(path, dpi=130)


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
    for group in dict.fromkeys(c.axes for c in calls):
        at = [i for i, c in enumerate(calls) if c.axes == group]
        total = size(sum(calls[i].sent for i in at))
        name = " x ".join(group)
        axes.vlines(at, 0, [calls[i].nbytes for i in at], color=_COLOURS.get(name, "#616161"), linewidth=2)
        axes.plot([], [], color=_COLOURS.get(name, "#616161"), linewidth=2, label=f"{name}: sends {total}")
    starts = [i for i, c in enumerate(calls) if i == 0 or calls[i - 1].phase != c.phase]
    for i in starts:
        axes.axvline(i - 0.5, color="#cfd8dc", linewidth=0.8)
        axes.text(
            i - 0.4, 1.01, calls[i].phase, transform=axes.get_xaxis_transform(), rotation=30, fontsize=8
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.set_xlabel("collectives, in order")
    axes.set_ylabel("bytes given")
    if calls:
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    else:
        axes.text(0.5, 0.5, "no collectives", transform=axes.transAxes, ha="center")
