"""What a backend says that it can do, told without starting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

_OWN = (torch.float32, torch.int64, torch.uint8)  # norms, counts, and the text of errors on other ranks


@dataclass(frozen=True)
class Capabilities:
    """What is declared is tested by ``tpcore.testing.conformance``; what is not is refused by ``tpcore.init``
    or, for the dtype of a parameter, when the layer is made: never only at the first collective."""

    dtypes: tuple[torch.dtype, ...] = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    """What every primitive takes, sums included."""
    moved: tuple[torch.dtype, ...] = ()
    """What primitives that compute nothing take beyond ``dtypes``. Of complex numbers sums are taken too."""
    group_sizes: tuple[int, ...] | None = None
    """Sizes that a group may have, besides 1; None: any."""
    tracing: bool = False
    """Whether models can be traced for this backend."""
    dynamic_shapes: bool = True
    """Whether one traced program can take inputs of several sizes."""

    def lack(self) -> str | None:
        """What tpcore cannot do without and this does not declare; None if all is there."""
        missing = [_name(d) for d in _OWN if d not in self.dtypes]
        return f"it does not sum {', '.join(missing)}, which tpcore needs" if missing else None

    def sums(self) -> dict[str, frozenset[torch.dtype]]:
        """The dtypes that each reduction takes."""
        complexes = {d for d in self.moved if d.is_complex}
        return {"sum": frozenset(self.dtypes) | complexes, "max": frozenset(self.dtypes)}

    def misfit(self, sizes: Mapping[str, int]) -> str | None:
        """Which of these groups, sizes by name, this backend cannot form; None if it can form all."""
        if self.group_sizes is None:
            return None
        for name, size in sizes.items():
            if size not in (1, *self.group_sizes):
                return f"a {name} group of {size} ranks; it forms groups of {list(self.group_sizes)}"
        return None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {k: [_name(d) for d in out[k]] for k in ("dtypes", "moved")}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
