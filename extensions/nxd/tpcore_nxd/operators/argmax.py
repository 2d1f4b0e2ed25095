"""The place of the largest value of a tensor whose parts are on the ranks of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .topk import whole_of


def argmax(tensor: Tensor, dim: int, gather_dim: int, keepdim: bool = False, process_group: Any = None) -> Tensor:
    """``torch.argmax`` of the whole tensor along ``dim``, of which ranks have parts along ``gather_dim``."""
    at = tensor.argmax(dim, keepdim=True)
    values, at = whole_of(tensor, tensor.gather(dim, at), at, dim, gather_dim, process_group)
    at = at.gather(dim, values.argmax(dim, keepdim=True))
    return at if keepdim else at.squeeze(dim)
