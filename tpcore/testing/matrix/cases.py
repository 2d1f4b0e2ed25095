"""A case of the matrix, and a row of it: all cases of a layer, generated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.context import ParallelContext
from ..kit.samples import multiple
from .compare import Findings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def leading(case: Case, ctx: ParallelContext) -> tuple[int, ...]:
    """The dims before the features, of which the ranks divide each sequence dim."""
    k = multiple(ctx.comm("tp").size)
    return (k, k, 2)[: case.ndim - 1]


@dataclass(frozen=True)
class Case:
    """One case of the matrix. ``options``: in the order of the row's axes."""

    layer: str
    dtype: str
    options: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python 3.10 looks up __setstate__ before the instance has its options
            raise AttributeError(name)
        for key, value in self.options:
            if key == name:
                return value
        raise AttributeError(f"{self} has no option {name!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.layer} {self.dtype} " + " ".join(f"{k}={v}" for k, v in self.options)


@dataclass(frozen=True)
class MatrixRow:
    """The cases of one layer: the product of ``axes``, of which it takes what it ``accepts``; ``check`` compares
    one."""

    name: str
    layer: object
    """The layer's class, or a function such as the loss. Every new layer of tpcore needs a row."""
    axes: Mapping[str, tuple[Any, ...]]
    check: Callable[[ParallelContext, Case, Findings], None]
    accepts: Callable[[dict[str, Any]], bool] = lambda options: True

    def cases(self, dtype: str, **only: Any) -> list[Case]:
        """Every combination of the axes; the number of dims and the memory layout alternate over them."""
        combinations = [dict(zip(self.axes, v, strict=True)) for v in itertools.product(*self.axes.values())]
        shapes = itertools.cycle(itertools.product((3, 2, 4, 3, 4), (False, True)))
        out = []
        for o, (ndim, scrambled) in zip(filter(self.accepts, combinations), shapes, strict=False):
            o |= {"ndim": max(ndim, 3) if o.get("seq") == 1 else ndim, "scrambled": scrambled}
            if all(o[k] == v for k, v in only.items()):
                out.append(Case(self.name, dtype, tuple(o.items())))
        return out
