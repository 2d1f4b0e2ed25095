"""How other programs than tpcore's run a step: stages of their own order, collectives beside compute, compiled kernels,
another recomputation, sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .meter import ATTENTION, SCORES, Operator

RECOMPUTED = ("nothing", "attention", "half", "layers")
OVERLAPPED = ("dp", "ep", "cp", "tp", "pp")


@dataclass(frozen=True)
class Execution:
    """How a step runs, where not in tpcore's way.

    ``interleaved``: stages of a device; microbatches go one forward, one backward. ``recompute``: in backward
    "nothing", the "attention", "half" (every second matmul, and all that is no matmul and no attention) or "layers".
    ``overlap``: mesh axes whose collectives run beside compute; "dp" with sums of gradients. ``fused``: operators
    without FLOPs are compiled into fewer. ``sharded``: FSDP: data ranks share parameters, which are gathered for each
    layer, and gradients. ``scores``: attention writes its scores, as it did before there were fused kernels."""

    interleaved: int = 1
    recompute: str = "nothing"
    overlap: tuple[str, ...] = ()
    fused: bool = False
    sharded: bool = False
    scores: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.interleaved, int) or self.interleaved < 1:
            raise ValueError(f"interleaved must be a whole number above 0, not {self.interleaved!r}")
        if self.recompute not in RECOMPUTED:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTED)}, not {self.recompute!r}")
        if unknown := [axis for axis in self.overlap if axis not in OVERLAPPED]:
            raise ValueError(f"overlap must be of the axes {', '.join(OVERLAPPED)}, not {unknown[0]!r}")

    def __str__(self) -> str:
        words = [f"{self.interleaved} stages a device"] if self.interleaved > 1 else []
        words += [f"recomputes {self.recompute}"] if self.recompute != "nothing" else []
        words += [f"{', '.join(self.overlap)} overlapped"] if self.overlap else []
        words += [name for name in ("fused", "sharded", "scores") if getattr(self, name)]
        return "; ".join(words) or "one forward, one backward"

    def again(self, operators: Iterable[Operator]) -> Iterator[Operator]:
        """Those of a layer's forward that run in backward again."""
        for o in operators:
            attention = o.name in (ATTENTION, SCORES)
            if self.recompute == "layers" or (self.recompute == "attention" and attention and self.scores):
                yield o
            elif self.recompute == "half" and not attention:
                yield replace(o, times=o.times / 2) if o.flops else o
