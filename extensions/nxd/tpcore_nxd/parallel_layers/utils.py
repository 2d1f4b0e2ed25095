"""NeuronX Distributed's helpers for model code: parts of tensors, random streams, log-probabilities."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tpcore import nested, settings
from tpcore.layers.loss import parallel_cross_entropy
from tpcore.layers.module import move_model_to_device
from tpcore.layers.sharding import sharding
from tpcore.layout.shard import divide
from tpcore.log import inform
from tpcore.runtime.context import current
from tpcore.runtime.random import get_state, manual_seed, set_state, sharded

from ..marks import cut_of_layer
from ..paths import mirror
from .attributes import mark

__all__ = ["EmbeddingUtility", "copy_tensor_model_parallel_attributes", "divide", "ensure_divisibility"]
__all__ += ["get_local_world_size", "get_number_of_extra_heads", "get_padding_length", "is_pjrt_device"]
__all__ += ["move_all_tensor_to_cpu", "move_model_to_device", "param_is_not_tensor_parallel_duplicate"]
__all__ += ["cast_all", "cast_if_autocast_enabled", "pad_model", "split_tensor_along_second_dim"]
__all__ += ["requires_init_pg_override", "split_tensor_along_dim", "split_tensor_along_last_dim"]
__all__ += ["XLARNGStatesTracker", "get_xla_rng_tracker", "model_parallel_xla_manual_seed"]
__all__ += ["from_parallel_logits_to_logprobs", "parallel_cross_entropy"]

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"


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


def split_tensor_along_second_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def cast_all(state: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """``state``, a nest of lists, tuples and dicts, with its tensors of ``from_dtype`` as ``to_dtype``."""
    return nested.mapped(lambda t: t.to(to_dtype) if t.dtype == from_dtype else t, state)


def cast_if_autocast_enabled(*args: Any) -> Any:
    """``args``; under autocast with the tensors that it casts, floating ones but float64, in its dtype."""
    kinds = [t.device.type for t in nested.tensors(args)]
    active = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not active:
        return args
    dtype = torch.get_autocast_dtype(active[0])

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return nested.mapped(cast, args)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the layout of ``source_tensor`` to ``destination_tensor``, e.g. a float32 master copy of a
    parameter, for ``clip_grad_norm``. Does nothing if the source is neither a parallel layer's nor marked."""
    source = sharding(source_tensor)
    if source is not None:
        mark(destination_tensor, source)


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


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add to ``n_head`` so that ``tp_degree`` divides them."""
    return get_padding_length(n_head, tp_degree)


def pad_model(
    model: nn.Module, tp_degree: int, n_heads: int, wrapped_classes: Any = (), pad_hook_fn: Any = None
) -> nn.Module:
    """``model``, if ``tp_degree`` divides its heads, so that there is nothing to pad; ValueError if not."""
    if n_heads % tp_degree:
        raise ValueError(
            f"pad_model(tp_degree={tp_degree}, n_heads={n_heads}): a layer is padded as it is made: pass pad=True to "
            f"its projections, with sizes for {n_heads + get_number_of_extra_heads(n_heads, tp_degree)} heads"
        )
    return model


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """``data``, a nest of lists, tuples and dicts, with its tensors on the CPU; itself unless ``convert``."""
    return nested.mapped(Tensor.cpu, data) if convert else data


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank is the one that counts ``param``: of the cut ones every rank, else the first."""
    sharded_as = sharding(param)
    return bool(sharded_as and cut_of_layer(sharded_as.layout)) or current().coord("tp") == 0


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


class XLARNGStatesTracker:
    """Its ``fork`` is for dropout on cut activations. It has no state: streams are derived from torch's generator,
    whose state is the only one to save (``tpcore.random``)."""

    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> AbstractContextManager[None]:
        """``tpcore.random.sharded()``: different numbers on each tp rank, and in each block, whatever its ``name``."""
        return sharded()

    def add(self, name: str, seed: int) -> None:
        """A line that nothing is to add: ``tpcore.random.manual_seed`` seeds what all streams come from."""
        if current().rank == 0:
            inform(f"random stream {name!r}: seed {seed} is not needed, streams come from the one generator")

    def get_states(self) -> dict[str, Tensor]:
        """``tpcore.random.get_state()``: what all streams come from."""
        return get_state()

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Go on from what ``get_states`` gave."""
        set_state(states)

    def reset(self) -> None:
        """Nothing: there are no streams to forget."""


_TRACKER = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    return _TRACKER


def model_parallel_xla_manual_seed(seed: int) -> None:
    """``tpcore.random.manual_seed``: call it after initialization, with the same seed on every rank."""
    manual_seed(seed)


def from_parallel_logits_to_logprobs(vocab_parallel_logits: Tensor, target: Tensor, inference: bool = True) -> Tensor:
    """The log-probability of each next token: ``[batch, sequence - 1]``, the same on every rank.

    ``vocab_parallel_logits``: ``[batch, sequence, vocab / tp]``. ``target``: ``[batch, sequence]``, the tokens
    themselves, which are shifted here: position i is scored against token i + 1. ``inference``: without gradient.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference):
        # the last position has no next token; any id is in range there, and its score is dropped
        return -parallel_cross_entropy(vocab_parallel_logits, target.roll(-1, -1))[:, :-1]


mirror(__name__, *(f"parallel_layers.{name}" for name in ("loss_functions", "pad", "random")))
