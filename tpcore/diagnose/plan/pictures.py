"""Plans as a picture: memory and time by mesh, stacked, and how throughput scales with devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..explain.summary import size

_BEST = 10
_COLOURS = ("#3f51b5", "#ef6c00", "#00897b", "#8e24aa", "#c62828", "#616161", "#9e9d24", "#0288d1", "#6d4c41")


def save_pictures(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    title: str = "",
    limit: float | None = None,
    curves: Mapping[str, Mapping[int, float]] | None = None,
) -> None:
    """Draw the first ten ``rows``, the best first: each with ``mesh``, a label; ``memory``, bytes a device by kind;
    and ``seconds`` of a step by part. ``limit``: bytes that a device has. ``curves``: tokens a second by number
    of devices, by label. The suffix of ``path`` chooses the format. Needs matplotlib. ValueError without rows."""
    if not rows:
        raise ValueError("there is no plan to draw: no mesh fits")
    from matplotlib.figure import Figure

    best = rows[:_BEST]
    figure = Figure(figsize=(12, 2.6 + 0.32 * len(best) + (3.6 if curves else 0)), layout="constrained")
    cells: list[Any] = [["memory", "time"], *([["scaling", "scaling"]] if curves else [])]
    heights = [1.6 + 0.32 * len(best), *([3.6] if curves else [])]
    places = figure.subplot_mosaic(cells, height_ratios=heights)
    figure.suptitle(title)
    _stacked(places["memory"], best, "memory", "memory a device")
    places["memory"].xaxis.set_major_formatter(lambda value, _: size(value))
    if limit is not None:
        places["memory"].axvline(limit, color="#c62828", linestyle="--", linewidth=1)
    _stacked(places["time"], best, "seconds", "seconds of a step, predicted")
    places["time"].tick_params(labelleft=False)
    if curves:
        _scaling(places["scaling"], curves)
    figure.savefig(path, dpi=130)


def _stacked(axes: Any, rows: Sequence[Mapping[str, Any]], field: str, title: str) -> None:
    """One bar a mesh, the best on top. A part keeps its colour in all bars; it may be missing in some."""
    labels = [row["mesh"] for row in rows]
    left = [0.0] * len(rows)
    for i, kind in enumerate(dict.fromkeys(kind for row in rows for kind in row[field])):
        widths = [row[field].get(kind, 0.0) for row in rows]
        if any(widths):
            axes.barh(range(len(rows)), widths, left=left, color=_COLOURS[i % len(_COLOURS)], label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.02)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _scaling(axes: Any, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Log-log, with the line that the first point of each curve would follow without loss."""
    for i, (label, points) in enumerate(curves.items()):
        counts = sorted(points)
        colour = _COLOURS[i % len(_COLOURS)]
        axes.plot(counts, [points[n] for n in counts], marker="o", markersize=3, color=colour, label=label)
        ideal = [points[counts[0]] * n / counts[0] for n in counts]
        axes.plot(counts, ideal, color=colour, linestyle=":", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="tokens a second, predicted")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("scaling; dotted: without loss", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
