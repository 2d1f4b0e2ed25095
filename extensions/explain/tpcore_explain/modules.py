"""What a sharded model holds on this rank: a row for each kind of parameter, how it is sharded, or why it is whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from tpcore.layers.module import ParallelModule
from tpcore.layers.sharding import sharding
from tpcore.layout.mesh import Mesh


@dataclass(frozen=True)
class ParameterPart:
    """Parameters that differ in their layers' numbers alone. ``name``: with ``*`` for such a number. ``layer``: the
    class of the module that owns it. ``here`` and ``full``: shapes on this rank, padding included, and of the whole
    parameter. ``how``: dims and mesh axes, or the reason why each rank has all of it. ``times``: how many they are."""

    name: str
    layer: str
    here: tuple[int, ...]
    full: tuple[int, ...]
    how: str
    nbytes: int
    times: int = 1

    @property
    def full_nbytes(self) -> int:
        """Bytes of the whole parameters."""
        return self.times * self.nbytes * math.prod(self.full) // max(math.prod(self.here), 1)


@dataclass(frozen=True)
class ShardedModel:
    """The rows of a model, in order; ``print`` shows them as a table."""

    model: str
    mesh: Mesh
    rows: tuple[ParameterPart, ...]

    def __str__(self) -> str:
        here, full = sum(row.nbytes * row.times for row in self.rows), sum(row.full_nbytes for row in self.rows)
        axes = ", ".join(f"{axis}={n}" for axis, n in self.mesh.axes.items() if n > 1) or "one rank"
        cells = [("parameter", "layer", "here", "whole", "how")]
        cells += [
            (f"{row.name}{f' ({row.times})' * (row.times > 1)}", row.layer, _shape(row.here), _shape(row.full), row.how)
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(n) for c, n in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([f"{self.model} on {axes}: {here:,} of {full:,} bytes of parameters on this rank", *lines])


def sharded_model(model: nn.Module) -> ShardedModel:
    """What ``model`` holds on this rank. ValueError for a model that nothing has sharded."""
    meshes = [mark.ctx.mesh for p in model.parameters() if (mark := sharding(p)) is not None]
    if not meshes:
        raise ValueError(
            f"nothing of this {type(model).__name__} is sharded: call tpcore.parallelize or from_plain first, or give "
            "a function that returns it, whose step is then explained"
        )
    rows = tuple(replace(row, times=times) for row, times in Counter(_rows(model)).items())
    return ShardedModel(type(model).__name__, meshes[0], rows)


def pattern(name: str) -> str:
    """``encoder.layer.3.output`` as ``encoder.layer.*.output``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _rows(model: nn.Module) -> Iterator[ParameterPart]:
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            path = pattern(f"{prefix}.{name}".lstrip("."))
            first, mark = names.setdefault(id(p), path), sharding(p)
            full = tuple(p.shape) if mark is None else mark.layout.shape
            if first != path:
                yield ParameterPart(path, type(module).__name__, tuple(p.shape), full, f"tied to {first}", 0)
            else:
                yield ParameterPart(path, type(module).__name__, tuple(p.shape), full, _how(module, p), p.nbytes)


def _how(module: nn.Module, p: nn.Parameter) -> str:
    mark = sharding(p)
    if mark is not None and mark.axes:
        axes = set(mark.axes)
        cuts = [cut for cut in mark.layout.cuts if axes & set(cut.axes)]
        parts = [f"dim {cut.spec.dim} over {' x '.join(cut.axes)}" for cut in cuts] or [f"over {' x '.join(mark.axes)}"]
        blocks = max((len(cut.spec.blocks) for cut in cuts), default=1)
        parts += [f"{blocks} parts, each by itself"] * (blocks > 1) + ["padded"] * mark.layout.padded(mark.ctx.mesh)
        return ", ".join(parts)
    if isinstance(module, ParallelModule):
        if mark is not None and mark.layout.cuts:
            return "whole: the mesh has one rank along its axis"
        return "whole: what the layer adds to the sum of all ranks"
    return "whole: of full features, every rank the same" if p.ndim < 2 else "whole: no layer or rule shards it"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one value"
