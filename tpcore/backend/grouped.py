"""Products of groups of rows with matrices of their own, for backends that have no kernel for them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.wrapper import NAMESPACE


def one_by_one(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """A ``Backend.grouped_matmul`` of one product for each matrix with rows. Reads ``ends``."""
    *rows, rest = x.tensor_split(ends.long().cpu())
    products = [part @ weight for part, weight in zip(rows, weights, strict=True) if len(part)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[-1])])


OPERATOR = f"{NAMESPACE}::grouped_matmul"
"""``one_by_one`` in a graph, without gradients: the graph has the shapes, the operator reads the values."""
grouped_matmul = torch.library.custom_op(OPERATOR, one_by_one, mutates_args=())
# by shape[0]: a len() would make a number of a dynamic dim
grouped_matmul.register_fake(lambda x, weights, ends: x.new_empty(x.shape[0], weights.shape[-1]))
