"""What a backend declares that it can do; readable without starting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

_OWN = (torch.float32, torch.int64, torch.uint8)  # for norms, counts, and errors sent to other ranks


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a backend. ``tpcore.testing.conformance`` tests all that is declared. All else is
    refused early, never only at the first collective: by ``tpcore.init``, and a parameter's dtype by the
    layer's constructor."""

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
    """Dtypes that every primitive takes, sums included."""
    moved: tuple[torch.dtype, ...] = ()
    """More dtypes, for primitives that move and do not sum. Complex dtypes listed here are summed too."""
    group_sizes: tuple[int, ...] | None = None
    """Sizes that a group may have in addition to 1; None: any size."""
    tracing: bool = False
    """Whether models can be traced for this backend."""
    dynamic_shapes: bool = True
    """Whether one traced program can take inputs of several sizes."""

    def lack(self) -> str | None:
        """A message about dtypes that tpcore needs and the backend does not declare; None if it has all."""
        missing = [_name(d) for d in _OWN if d not in self.dtypes]
        return f"it does not sum {', '.join(missing)}, which tpcore needs" if missing else None

    def sums(self) -> dict[str, frozenset[torch.dtype]]:
        """The dtypes that each reduction takes."""
        complexes = {d for d in self.moved if d.is_complex}
        return {"sum": frozenset(self.dtypes) | complexes, "max": frozenset(self.dtypes)}

    def misfit(self, sizes: Mapping[str, int]) -> str | None:
        """A message about the first group that this backend cannot form, or None. ``sizes``: by name."""
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
