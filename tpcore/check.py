"""Checks made before work starts: that ranks agree on a collective, that ids fit a vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def call_site(also: str = "") -> str:
    """``file.py:line in function`` of the innermost frame outside tpcore, torch and the file ``also``."""
    frame = sys._getframe(1)
    outermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY) and name != also and not name.startswith("<"):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        outermost, frame = frame, frame.f_back  # type: ignore[assignment]
    return f"{outermost.f_code.co_filename}:{outermost.f_lineno} in {outermost.f_code.co_name}"


@dataclass(frozen=True)
class Call:
    """One collective as one rank is about to make it. Equal calls may run; the site is only told."""

    seq: int
    op: str  # with its reduction and dim: "all_reduce sum", "all_gather dim 0"
    shape: tuple[int, ...]
    dtype: torch.dtype
    site: str = field(compare=False)

    @classmethod
    def of(cls, seq: int, op: str, x: Tensor, site: str) -> Call:
        return cls(seq, op, tuple(x.shape), x.dtype, site)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"#{self.seq} {self.op} of {dtype} {list(self.shape)} at {self.site}"


def disagreement(calls: Sequence[Call], ranks: Sequence[int]) -> str | None:
    """None if all ranks make the same call; else a message naming the first two that differ."""
    for rank, call in zip(ranks[1:], calls[1:], strict=True):
        if call != calls[0]:
            return (
                f"ranks {ranks[0]} and {rank} of group {tuple(ranks)} disagree on their next collective:\n"
                f"  rank {ranks[0]}: {calls[0]}\n  rank {rank}: {call}\n"
                "Every rank of a group must make the same collectives in the same order."
            )
    return None


def check_ids(ids: Tensor, size: int, what: str, ignore: int | None = None) -> None:
    """Raise IndexError if an id is outside ``range(size)`` and not ``ignore``.

    Reads values: callers skip it on lazy backends, where that would cut the graph.
    """
    if not ids.numel() or ids.is_meta or torch.compiler.is_compiling():
        return
    seen = ids if ignore is None else ids.masked_fill(ids == ignore, 0)
    low, high = (int(v) for v in torch.aminmax(seen))
    if low < 0 or high >= size:
        kept = "" if ignore is None else f" (ignore_index={ignore})"
        raise IndexError(f"{what}: ids from {low} to {high} do not fit a vocabulary of {size}{kept}")
