"""The mappings of ``tpcore.ops`` under their NeuronX Distributed names.

``process_group``: a group that ``parallel_state`` returned, one made with the backend's own library, a
``tpcore.Comm``, or None for the tp group. Names say what the forward does; the gradient goes the
transposed way. Differentiable any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..context import current


def copy_to_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """As it is; gradients are summed over the group."""
    return ops.copy(x, current().comm_for(process_group))


def reduce_from_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """The sum over the group; gradients pass as they are.

    Where autograd does not record it, ``x`` itself becomes the sum and is returned: published loops sum
    gradients by ``reduce_from_tensor_model_parallel_region(p.grad)`` and drop what it returns.
    """
    y = ops.reduce(x, current().comm_for(process_group))
    if y is x or y.requires_grad or _shares_places(x) or torch.compiler.is_compiling():
        return y
    with torch.no_grad():
        return x.copy_(y)


def _shares_places(x: Tensor) -> bool:
    """Whether entries of ``x`` lie at one place in memory, as ``expand`` makes them: those take one value."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def scatter_to_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """This rank's chunk along the last dim; gradients are gathered."""
    return ops.scatter(x, current().comm_for(process_group), -1)


def gather_from_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """All chunks along the last dim; of the gradient this rank keeps its own."""
    return ops.gather(x, current().comm_for(process_group), -1)


def scatter_to_sequence_parallel_region(
    x: Tensor, sequence_dimension: int = 0, process_group: Any = None
) -> Tensor:
    """This rank's chunk of the tokens; gradients are gathered."""
    return ops.scatter(x, current().comm_for(process_group), sequence_dimension)


def gather_from_sequence_parallel_region(
    x: Tensor, sequence_dimension: int = 0, to_model_parallel: bool = True, process_group: Any = None
) -> Tensor:
    """All tokens. ``to_model_parallel``: what follows differs between the ranks (a tensor-parallel
    region), so gradients are summed and scattered; if False it is the same on all, and this rank keeps
    its chunk of the gradient."""
    gather = ops.all_gather if to_model_parallel else ops.gather
    return gather(x, current().comm_for(process_group), sequence_dimension)


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, sequence_dimension: int = 0, process_group: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's chunk of the sum over the group; gradients are gathered. ``dtype``: the least precision
    to sum in."""
    return ops.reduce_scatter(x, current().comm_for(process_group), sequence_dimension, dtype=dtype)


def gather_from_tensor_model_parallel_region_with_dim(
    x: Tensor, gather_dim: int, process_group: Any = None
) -> Tensor:
    """All chunks along ``gather_dim``; of the gradient this rank keeps its own."""
    return ops.gather(x, current().comm_for(process_group), gather_dim)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    x: Tensor, partition_dim: int, process_group: Any = None
) -> Tensor:
    """This rank's chunk of the sum over the group, along ``partition_dim``; gradients are gathered."""
    return ops.reduce_scatter(x, current().comm_for(process_group), partition_dim)


# published code imports these by their private names, to move tensors outside of autograd
def _split_along_first_dim(x: Tensor, process_group: Any = None) -> Tensor:
    return current().comm_for(process_group).split(x.detach(), 0)


def _gather_along_first_dim(x: Tensor, process_group: Any = None) -> Tensor:
    return _gather_along_dim(x, 0, process_group)


def _gather_along_dim(x: Tensor, dim: int, process_group: Any = None) -> Tensor:
    return current().comm_for(process_group).all_gather(x.detach(), dim)


def _reduce_scatter_along_dim(x: Tensor, dim: int, process_group: Any = None) -> Tensor:
    return current().comm_for(process_group).reduce_scatter(x.detach(), dim)


__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region_with_dim",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
