"""The largest values of a tensor whose parts are on the ranks of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpcore.runtime.context import current


def topk(
    tensor: Tensor,
    k: int,
    dim: int,
    gather_dim: int,
    process_group: Any = None,
    stages: int = 1,
    rank_id: Any = None,
    use_topk_rotated_kernel: bool = False,
    lnc: int = 2,
) -> tuple[Tensor, Tensor]:
    """``torch.topk`` of the whole tensor along ``dim``, of which ranks have parts along ``gather_dim``: values and
    places, the same on all ranks. The arguments after the group choose among kernels and messages: they change nothing.
    """
    values, at = tensor.topk(min(k, tensor.shape[dim]), dim)
    values, at = whole_of(tensor, values, at, dim, gather_dim, process_group)
    values, best = values.topk(k, dim)
    return values, at.gather(dim, best)


def whole_of(
    tensor: Tensor, values: Tensor, at: Tensor, dim: int, gather_dim: int, process_group: Any
) -> tuple[Tensor, Tensor]:
    """``values`` and their places ``at`` in ``tensor``, of all ranks: places in the whole tensor."""
    comm = current().comm_for(process_group)
    if dim % tensor.ndim == gather_dim % tensor.ndim:
        at = at + comm.position * tensor.shape[dim]
    return comm.all_gather(values, gather_dim), comm.all_gather(at, gather_dim)
