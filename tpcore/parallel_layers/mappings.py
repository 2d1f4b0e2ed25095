"""The mappings of ``tpcore.ops`` under their NeuronX Distributed names.

``process_group``: a group from ``parallel_state``, a group made with the backend's own library, a
``tpcore.Comm``, or None for the tp group. A name describes the forward map; backward is its transpose.
Differentiable any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..context import current


def copy_to_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """``x`` unchanged; backward sums the gradients over the group."""
    return ops.copy(x, current().comm_for(process_group))


def reduce_from_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """The sum over the group; backward leaves the gradient unchanged."""
    return ops.reduce(x, current().comm_for(process_group))


def scatter_to_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """This rank's chunk along the last dim; backward gathers the gradients."""
    return ops.scatter(x, current().comm_for(process_group), -1)


def gather_from_tensor_model_parallel_region(x: Tensor, process_group: Any = None) -> Tensor:
    """All chunks along the last dim; backward keeps this rank's chunk of the gradient."""
    return ops.gather(x, current().comm_for(process_group), -1)


def scatter_to_sequence_parallel_region(
    x: Tensor, sequence_dimension: int = 0, process_group: Any = None
) -> Tensor:
    """This rank's chunk of the tokens; backward gathers the gradients."""
    return ops.scatter(x, current().comm_for(process_group), sequence_dimension)


def gather_from_sequence_parallel_region(
    x: Tensor, sequence_dimension: int = 0, to_model_parallel: bool = True, process_group: Any = None
) -> Tensor:
    """All tokens. ``to_model_parallel``: the following work differs between the ranks (a tensor-parallel
    region), so backward sums and scatters the gradients. False: the ranks repeat the same work, and backward
    keeps this rank's chunk of the gradient."""
    gather = ops.all_gather if to_model_parallel else ops.gather
    return gather(x, current().comm_for(process_group), sequence_dimension)


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, sequence_dimension: int = 0, process_group: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's chunk of the sum over the group; backward gathers the gradients. ``dtype``: the least
    precision of the sum."""
    return ops.reduce_scatter(x, current().comm_for(process_group), sequence_dimension, dtype=dtype)


__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
