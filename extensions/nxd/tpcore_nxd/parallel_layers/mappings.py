"""The mappings of ``tpcore.comm.mappings`` under their NeuronX Distributed names.

``process_group``: a group from ``parallel_state``, a group made with the backend's own library, a
``tpcore.comm.Comm``, or None for the tp group. A name describes the forward map; backward is its transpose.
Differentiable any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpcore.comm import mappings as ops
from tpcore.runtime.context import current


def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    """``input_`` unchanged; backward sums the gradients over the group."""
    return ops.copy(input_, current().comm_for(process_group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    """The sum over the group; backward leaves the gradient unchanged. If autograd does not record the call, the sum is
    written into ``input_``, which is returned: published loops call it on ``p.grad`` and drop the result."""
    y = ops.reduce(input_, current().comm_for(process_group))
    # as in the result of expand, where several entries are one place in memory
    shared = any(stride == 0 and size > 1 for stride, size in zip(input_.stride(), input_.shape, strict=True))
    if y is input_ or y.requires_grad or shared or torch.compiler.is_compiling():
        return y
    with torch.no_grad():
        return input_.copy_(y)


def scatter_to_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    """This rank's chunk along the last dim; backward gathers the gradients."""
    return ops.scatter(input_, current().comm_for(process_group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    """All chunks along the last dim; backward keeps this rank's chunk of the gradient."""
    return ops.gather(input_, current().comm_for(process_group), -1)


def scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: Any = None
) -> Tensor:
    """This rank's chunk of the tokens; backward gathers the gradients."""
    return ops.scatter(input_, current().comm_for(process_group), sequence_dimension)


def gather_from_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, to_model_parallel: bool = True, process_group: Any = None
) -> Tensor:
    """All tokens. ``to_model_parallel``: the following work differs between the ranks (a tensor-parallel
    region), so backward sums and scatters the gradients. False: the ranks repeat the same work, and backward
    keeps this rank's chunk of the gradient."""
    gather = ops.all_gather if to_model_parallel else ops.gather
    return gather(input_, current().comm_for(process_group), sequence_dimension)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's chunk of the sum over the group; backward gathers the gradients. ``dtype``: the least
    precision of the sum."""
    return ops.reduce_scatter(input_, current().comm_for(process_group), sequence_dimension, dtype=dtype)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: Tensor, gather_dim: int, process_group: Any = None
) -> Tensor:
    """All chunks along ``gather_dim``; of the gradient this rank keeps its own."""
    return ops.gather(input_, current().comm_for(process_group), gather_dim)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    input_: Tensor, partition_dim: int, process_group: Any = None
) -> Tensor:
    """This rank's chunk of the sum over the group, along ``partition_dim``; gradients are gathered."""
    return ops.reduce_scatter(input_, current().comm_for(process_group), partition_dim)


# published code imports these by their private names, to move tensors outside of autograd
def _split_along_first_dim(input_: Tensor, process_group: Any = None) -> Tensor:
    return current().comm_for(process_group).split(input_.detach(), 0)


def _gather_along_dim(input_: Tensor, dim: int, process_group: Any = None) -> Tensor:
    return current().comm_for(process_group).all_gather(input_.detach(), dim)


def _gather_along_first_dim(input_: Tensor, process_group: Any = None) -> Tensor:
    return _gather_along_dim(input_, 0, process_group)


def _reduce_scatter_along_dim(input_: Tensor, dim: int, process_group: Any = None) -> Tensor:
    return current().comm_for(process_group).reduce_scatter(input_.detach(), dim)
