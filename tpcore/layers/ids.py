"""Range check of ids against a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def exporting() -> bool:
    """Whether torch.export traces."""
    ask = getattr(torch.compiler, "is_exporting", None)  # torch 2.7
    return bool(ask and ask())


def check_ids(ids: Tensor, size: int, what: str, ignore: int | None = None, *, read: bool = True) -> None:
    """Raise IndexError if an id is outside ``range(size)`` and not ``ignore``. It reads values; under torch.export and
    torch.compile, and without ``read``, it is an assertion in the graph or the device's queue: a RuntimeError."""
    if not read or exporting() or torch.compiler.is_dynamo_compiling():
        if ids.is_meta:
            return
        fits = (ids >= 0) & (ids < size)
        fits = fits if ignore is None else fits | (ids == ignore)
        torch._assert_async(fits.all(), f"{what}: an id does not fit a vocabulary of {size}")
        return
    if not ids.numel() or ids.is_meta:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if ignore is not None and (low < 0 or high >= size):
        low, high = (int(v) for v in torch.aminmax(ids.masked_fill(ids == ignore, 0)))
    if low < 0 or high >= size:
        kept = "" if ignore is None else f" (ignore_index={ignore})"
        raise IndexError(f"{what}: ids from {low} to {high} do not fit a vocabulary of {size}{kept}")
