"""NeuronX Distributed's small helpers for model code."""

from __future__ import annotations

from torch import Tensor

from ..layers.module import move_model_to_device
from ..layers.sharding import sharding, stamp
from ..shard import divide


def ensure_divisibility(numerator: int, denominator: int) -> None:
    divide(numerator, denominator)


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of ``tensor`` along ``dim``: views, or copies with ``contiguous_split_chunks``."""
    parts = tensor.split(divide(tensor.shape[dim], num_partitions), dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the layout of ``source_tensor`` to ``destination_tensor``, e.g. a float32 master copy of a
    parameter, for ``clip_grad_norm``. Does nothing if the source belongs to no parallel layer."""
    found = sharding(source_tensor)
    if found is not None:
        stamp(destination_tensor, found)


__all__ = [
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "move_model_to_device",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
]
