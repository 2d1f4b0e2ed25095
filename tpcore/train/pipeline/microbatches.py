"""Divides a batch into microbatches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from .arguments import LayerArguments


def check_count(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"num_microbatches must be a whole number, 1 or more, not {number!r}")
    return number


def check_divides(batch: int, count: int) -> int:
    """``count``. ValueError if it does not divide the batch."""
    if not batch or batch % count:
        fit = ", ".join(str(n) for n in range(1, batch + 1) if not batch % n)
        raise ValueError(
            f"a batch of {batch} does not divide into num_microbatches={count}: "
            + (f"{fit} would do" if batch else "it is empty")
        )
    return count


def microbatches(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, shared: Collection[str], *, copied: bool
) -> list[LayerArguments]:
    """Each microbatch's arguments: its part of every tensor whose dim 0 has the size of the first tensor's.
    ``copied``: in memory of its own, so that one program serves all microbatches."""
    names = tuple(f"argument {i}" for i in range(len(args)))
    whole = LayerArguments(names, args, kwargs)
    batch = next((len(t) for t in whole.tensors() if t.ndim), 0)
    check_divides(batch, count)

    def part(t: Tensor, name: str, i: int) -> Tensor:
        if not t.ndim or len(t) != batch or name in shared:
            return t
        chunk = t.chunk(count)[i]
        return chunk.clone() if copied else chunk

    return [whole.mapped(lambda t, name, i=i: part(t, name, i)) for i in range(count)]  # type: ignore[misc]
