"""NeuronX Distributed's small helpers for model code."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree

from ... import settings
from ...layers.module import move_model_to_device
from ...layers.sharding import sharding, stamp
from ...layout.shard import divide
from ...runtime.context import current
from .attributes import mark


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
        mark(destination_tensor)


def get_local_world_size() -> int:
    """Processes of the job on this host."""
    return settings.LOCAL_WORLD_SIZE.get()


def requires_init_pg_override() -> bool:
    """False: no version of torch needs it."""
    return False


def is_pjrt_device() -> bool:
    """False: a script need not choose its runtime, the backend has."""
    return False


def get_padding_length(numerator: int, denominator: int) -> int:
    """What to add to ``numerator`` so that ``denominator`` divides it."""
    return -numerator % denominator


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """``data``, a nest of lists, tuples and dicts, with its tensors on the CPU; itself unless ``convert``."""
    return _pytree.tree_map(lambda t: t.cpu() if isinstance(t, Tensor) else t, data) if convert else data


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank is the one that counts ``param``: of the cut ones every rank, else the first."""
    found = sharding(param)
    return bool(found and found.layout.cuts) or current().coord("tp") == 0


class EmbeddingUtility:
    """Which rows of a table a rank holds, as ``(first, one past the last)``."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is none of {world_size}")
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        size = divide(global_vocab_size, world_size)
        return EmbeddingUtility.range_from_per_partition_vocab_size(size, rank, world_size)


__all__ = [
    "EmbeddingUtility",
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "get_local_world_size",
    "get_padding_length",
    "is_pjrt_device",
    "move_all_tensor_to_cpu",
    "move_model_to_device",
    "param_is_not_tensor_parallel_duplicate",
    "requires_init_pg_override",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
]
