"""A short summary of a program: equal parameters and collectives of several layers in one row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .recording import Collective
from .step import Parameter, Program


@dataclass
class Kind:
    """Equal collectives of several layers."""

    first: Collective
    module: str  # the module's name, with * for the numbers that differ
    times: int = 0

    @property
    def sent(self) -> int:
        return self.times * self.first.sent


def pattern(name: str) -> str:
    """``encoder.layer.3.output`` as ``encoder.layer.*.output``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def kinds(calls: Sequence[Collective]) -> list[Kind]:
    """The kinds of ``calls``, in the order of each kind's first call."""
    found: dict[tuple[object, ...], Kind] = {}
    for call in calls:
        module = pattern(call.module)
        key = (call.phase, call.axes, call.size, call.op, call.shape, call.dtype, module)
        kind = found.setdefault(key, Kind(call, call.module))
        kind.times += 1
        if kind.first.module != call.module:
            kind.module = module
    return list(found.values())


def alike(parameters: Iterable[Parameter]) -> list[tuple[str, Parameter, int]]:
    """(name with ``*``, the first of them, how many) of parameters that differ only in a layer's number."""
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Parameter]] = {}
    for p in parameters:
        found.setdefault((pattern(p.name), p.shape, p.full), []).append(p)
    return [(name, some[0], len(some)) for (name, _, _), some in found.items()]


def sizes(parameters: Iterable[Parameter]) -> tuple[int, int, int, int]:
    """Number of elements, and bytes of the parameters, of their gradients, of the optimizer's state."""
    some = [(math.prod(p.shape), p.nbytes, p.gradient, p.optimizer) for p in parameters]
    elements, nbytes, gradients, states = (sum(column) for column in zip((0, 0, 0, 0), *some, strict=True))
    return elements, nbytes, gradients, states


def replicated(program: Program, tp: int) -> list[str]:
    """Lines of text about the parameters that every tp rank has in full; none at tp=1."""
    whole = [p for p in program.parameters if not p.cut]
    if tp == 1 or not whole:
        return []
    if len(whole) == len(program.parameters):
        return [
            f"No parameter of {program.model} is cut: each of the {tp} tp ranks holds the whole model and "
            "repeats the same work. Build it of tpcore's layers, or name a function that puts them in its "
            "place: --parallelize path/to/file.py:function; a model of transformers: --plan auto"
        ]
    total = sum(p.nbytes for p in program.parameters)
    layers: dict[str, int] = {}
    for p in whole:
        name = f"{pattern(p.name.rpartition('.')[0]) or program.model} ({p.layer})"
        layers[name] = layers.get(name, 0) + p.nbytes
    lines = [f"Held in full by each of the {tp} tp ranks:"]
    for name, nbytes in sorted(layers.items(), key=lambda item: -item[1])[:8]:
        lines.append(f"  {name}: {size(nbytes)}, {100 * nbytes / total:.1f} % of the parameters here")
    return lines


def size(nbytes: float) -> str:
    units = ["TB", "GB", "MB", "kB", "B"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop()
    return f"{nbytes:.3g} {units[-1]}"
