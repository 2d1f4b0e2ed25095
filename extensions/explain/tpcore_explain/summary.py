"""Programs and plans for people: equal parameters and collectives of several layers in one row; pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from .explain import Explanation
from .modules import pattern
from .recording import Collective
from .step import Parameter, Program

_COLOURS = ("#3f51b5", "#ef6c00", "#00897b", "#8e24aa", "#c62828", "#616161", "#9e9d24", "#0288d1", "#6d4c41")
_AXES = dict(zip(("tp", "dp", "pp", "cp"), _COLOURS, strict=False))
_FULL = "#b0bec5"
_BEST = 10


def kinds(calls: Iterable[Collective]) -> list[tuple[Collective, str, int]]:
    """(the first, its module with ``*`` for numbers that differ, how many) of equal collectives of several layers."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for call in calls:
        key = (call.phase, call.axes, call.size, call.op, call.shape, call.dtype, pattern(call.module))
        groups.setdefault(key, []).append(call)
    return [
        (same[0], same[0].module if len({call.module for call in same}) == 1 else pattern(same[0].module), len(same))
        for same in groups.values()
    ]


def alike(parameters: Iterable[Parameter]) -> list[tuple[str, Parameter, int]]:
    """(name with ``*``, the first of them, how many) of parameters that differ only in a layer's number."""
    groups: dict[tuple[object, ...], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault((pattern(p.name), p.shape, p.full), []).append(p)
    return [(pattern(same[0].name), same[0], len(same)) for same in groups.values()]


def sizes(parameters: Iterable[Parameter]) -> tuple[int, int, int, int]:
    """Number of elements, and bytes of the parameters, of their gradients, of the optimizer's state."""
    rows = [(math.prod(p.shape), p.nbytes, p.gradient, p.optimizer) for p in parameters]
    elements, nbytes, gradients, states = (sum(column) for column in zip((0, 0, 0, 0), *rows, strict=True))
    return elements, nbytes, gradients, states


def replicated(program: Program, tp: int) -> list[str]:
    """Lines of text about the parameters that every tp rank has in full; none at tp=1."""
    whole = [p for p in program.parameters if not p.cut]
    if tp == 1 or not whole:
        return []
    if len(whole) == len(program.parameters):
        return [
            f"No parameter of {program.model} is sharded: each of the {tp} tp ranks holds the whole model and "
            "repeats the same work. Build it of tpcore's layers, or name a function that puts them in its "
            "place: --parallelize path/to/file.py:function; a model of transformers: --plan auto"
        ]
    total = sum(p.nbytes for p in program.parameters)
    layers: dict[str, int] = {}
    for p in whole:
        name = f"{pattern(p.name.rpartition('.')[0]) or program.model} ({p.layer})"
        layers[name] = layers.get(name, 0) + p.nbytes
    largest = sorted(layers.items(), key=lambda item: -item[1])[:8]
    parts = (f"  {name}: {size(n)}, {100 * n / total:.1f} % of the parameters here" for name, n in largest)
    return [f"Held in full by each of the {tp} tp ranks:", *parts]


def size(nbytes: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop()
    return f"{nbytes:.3g} {units[-1]}"


# -- pictures, by matplotlib --------------------------------------------------------------------------------
def save_picture(explanation: Explanation, path: Path) -> None:
    """Draw the first program. The suffix of ``path`` chooses the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    _, program = explanation.programs[0]
    rows = [row for row in alike(program.parameters) if len(row[1].full) > 1 or row[1].cut]
    height = 0.6 + 0.2 * len(rows)
    figure = Figure(figsize=(11, 4.2 + height), layout="constrained")
    cells: list[Any] = [["memory", "traffic"], ["cut", "cut"]]
    places = figure.subplot_mosaic(cells, width_ratios=[1, 2.4], height_ratios=[4.2, height])
    mesh = ", ".join(f"{axis}={n}" for axis, n in explanation.mesh.axes.items() if n > 1) or "one rank"
    figure.suptitle(f"{program.model}, {mesh}: one rank, one training step")
    parts = {
        label: sizes(p for p in program.parameters if p.cut is cut)[1:]
        for cut, label in ((True, "cut over tp"), (False, "held in full"))
    }
    totals = [f"{kind}\n{size(sum(parts[label][i] for label in parts))}" for i, kind in enumerate(_KINDS)]
    _stacked(places["memory"], totals, parts, "memory")
    places["memory"].xaxis.set_major_formatter(_as_size)
    _traffic(places["traffic"], program)
    _cut(places["cut"], rows)
    figure.savefig(path, dpi=130)


_KINDS = ("parameters", "gradients", "optimizer")


def _cut(axes: Any, rows: list[tuple[str, Parameter, int]]) -> None:
    """A box for each parameter, with this rank's part of it filled: a column of it, a row, or all."""
    from matplotlib.patches import Rectangle

    axes.set(xlim=(0, 100), ylim=(len(rows), 0))
    axes.axis("off")
    axes.set_title("what a rank holds of each", fontsize=10, loc="left")
    for at, (name, p, times) in enumerate(rows):
        # padding counts to the whole
        shares = [n / max(n, full) if p.cut else 1.0 for n, full in zip(p.shape, p.full, strict=True)]
        high, wide = (*shares, 1.0)[:2]
        colour = _AXES["tp"] if p.cut else _FULL
        for x, y, filled in ((1.0, 1.0, "white"), (wide, high, colour)):
            axes.add_patch(Rectangle((1, at + 0.1), 4.5 * x, 0.8 * y, fc=filled, ec="#455a64", lw=0.5))
        which = "held in full" if not p.cut else f"cut along dim {1 if wide < 1 else 0}"
        count = f"  ({times} times)" if times > 1 else ""
        text = f"{name}{count}   {list(p.full)}: {which}, {list(p.shape)} here"
        axes.text(7, at + 0.45, text, fontsize=8, va="center", family="monospace")


def _traffic(axes: Any, program: Program) -> None:
    calls = program.collectives
    for group, ranks in dict.fromkeys((c.axes, c.size) for c in calls):  # a group may be a part of its axes
        at = [i for i, c in enumerate(calls) if (c.axes, c.size) == (group, ranks)]
        name, total = " x ".join(group), size(sum(calls[i].sent for i in at))
        label, colour = f"{name} of {ranks}: sends {total}", _AXES.get(name, "#616161")
        axes.vlines(at, 0, [calls[i].nbytes for i in at], color=colour, linewidth=2, label=label)
    for i, call in enumerate(calls):
        if i == 0 or calls[i - 1].phase != call.phase:
            axes.axvline(i - 0.5, color="#cfd8dc", linewidth=0.8)
            axes.text(i - 0.4, 1.01, call.phase, transform=axes.get_xaxis_transform(), rotation=30, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_as_size)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="collectives, in order", ylabel="bytes given")
    if calls:
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    else:
        axes.text(0.5, 0.5, "no collectives", transform=axes.transAxes, ha="center")


def save_pictures(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, limit: float) -> None:
    """Draw the first ten ``rows``, the best first: each with ``mesh``, a label; ``memory``, bytes a device by kind;
    and ``seconds`` of a step by part. ``limit``: bytes that a device has. The suffix of ``path`` chooses the format.
    Needs matplotlib."""
    from matplotlib.figure import Figure

    best = rows[:_BEST]
    figure = Figure(figsize=(12, 2.6 + 0.32 * len(best)), layout="constrained")
    cells: list[Any] = [["memory", "seconds"]]
    places = figure.subplot_mosaic(cells)
    figure.suptitle(title)
    for field, text in (("memory", "memory a device"), ("seconds", "seconds of a step, predicted")):
        kinds = dict.fromkeys(kind for row in best for kind in row[field])  # one may be missing in some rows
        parts = {kind: [row[field].get(kind, 0.0) for row in best] for kind in kinds}
        _stacked(places[field], [row["mesh"] for row in best], parts, text)
    places["memory"].xaxis.set_major_formatter(_as_size)
    places["memory"].axvline(limit, color="#c62828", linestyle="--", linewidth=1)
    places["seconds"].tick_params(labelleft=False)
    figure.savefig(path, dpi=130)


def _stacked(axes: Any, rows: Sequence[str], parts: Mapping[str, Sequence[float]], title: str) -> None:
    """One bar a row, the first on top, of ``parts``, each with a width for each row."""
    left = [0.0] * len(rows)
    for colour, (kind, widths) in zip(cycle(_COLOURS), parts.items(), strict=False):
        if any(widths):
            axes.barh(range(len(rows)), widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.02)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _as_size(value: float, _: int) -> str:
    return size(value)
