"""Values of options that are read alike by several commands."""

from __future__ import annotations

import torch


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"torch has no floating dtype {name!r}")
    return found


def numbers_of(option: str, text: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, as 0,3, not {text!r}") from None
