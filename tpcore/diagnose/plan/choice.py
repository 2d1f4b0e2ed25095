"""A mesh, and what is chosen with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...layout.mesh import Mesh
from .reduced import Ways


@dataclass(frozen=True)
class Choice:
    """A mesh and what is chosen with it. ``microbatch``: examples of one; ``microbatches``: of a step, one after the
    other. ``recompute``: layers run again in backward, as they always do in stages. ``bucket_mb``: of Zero1."""

    ways: Ways = field(default_factory=Ways)
    pp: int = 1
    dp: int = 1
    microbatch: int = 1
    microbatches: int = 1
    recompute: bool = False
    zero1: bool = False
    bucket_mb: float = 4

    @property
    def mesh(self) -> Mesh:
        ways = self.ways
        return Mesh({"pp": self.pp, "dp": self.dp, "ep": ways.ep, "cp": ways.cp, "tp": ways.tp})

    @property
    def data(self) -> int:
        """Ranks whose gradients are summed."""
        return self.dp * self.ways.ep * self.ways.cp

    @property
    def batch(self) -> int:
        """Examples of a step, of all ranks."""
        return self.microbatch * self.microbatches * self.dp * self.ways.ep

    def __str__(self) -> str:
        axes = [f"{axis} {n}" for axis, n in self.mesh.axes.items() if n > 1] or ["1 device"]
        more = [f"{self.microbatches} x {self.microbatch}"]
        more += ["sequence parallel"] if self.ways.tp > 1 and self.ways.sequence_parallel else []
        more += ["whole experts"] if self.ways.tp > 1 and self.ways.expert_parallel else []
        more += [self.ways.context_parallel or "gather"] if self.ways.cp > 1 else []
        more += ["recompute"] if self.recompute and self.pp == 1 else []
        more += ["Zero1"] if self.zero1 else []
        return f"{', '.join(axes)}; {', '.join(more)}"
