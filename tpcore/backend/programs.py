"""What a traced program is, to those who ask for one and to the backend that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Function = Callable[[Mapping[str, Tensor], Sequence[Tensor]], list[Tensor]]
"""What is traced: outputs from weights by name and inputs, and from nothing else."""
LoadedProgram = Callable[[Sequence[Tensor]], list[Tensor]]
"""A traced function, loaded, with its weights in place."""


@dataclass(frozen=True)
class DynamicDim:
    """A dimension of an input whose size may change from call to call, within bounds that are included.

    Dimensions of one name have one size in every call.
    """

    name: str
    min: int = 1
    max: int | None = None

    def __str__(self) -> str:
        return f"{self.name} (from {self.min}" + (" on)" if self.max is None else f" to {self.max})")


Dims = Sequence[Mapping[int, DynamicDim]]
"""The dynamic dimensions of every input."""
