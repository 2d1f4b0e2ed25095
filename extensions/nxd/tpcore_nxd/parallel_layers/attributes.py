"""Attributes of layers and marks on parameters by the names that published scripts read; the norm with its own."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tpcore import layers
from tpcore.layers.initial import Init
from tpcore.layers.module import Device, ParallelModule
from tpcore.layers.sharding import Sharding, stamp

from ..marks import EXPERTS, cut_of_layer
from ..paths import mirror

Place = Device | Literal[False]
"""Where to allocate. False means None."""


def sequence_dim(enabled: bool, dim: int | None) -> int | None:
    """One value for two arguments: the sequence dimension (0 by default), or None."""
    if dim is not None and not enabled:
        raise ValueError(f"sequence_dimension={dim} without sequence_parallel_enabled=True has no meaning")
    return (dim or 0) if enabled else None


def mark(tensor: Any, sharded_as: Sharding) -> None:
    """Stamp ``tensor``, and set the attributes by which NeuronX Distributed and Megatron-LM describe its sharding."""
    stamp(tensor, sharded_as)
    cut = cut_of_layer(sharded_as.layout)
    if any(of.axes == EXPERTS for of in sharded_as.layout.cuts):
        tensor.expert_model_parallel = True
    tensor.tensor_model_parallel = cut is not None
    tensor.partition_dim = -1 if cut is None else cut.spec.dim
    tensor.partition_stride = 1 if cut is None else len(cut.spec.blocks)
    tensor.num_partitions = 1 if cut is None else cut.degree(sharded_as.ctx.mesh)


class PublishedAttributes(ParallelModule):
    """The attributes of every layer with a sharded weight. They are for reading: setting one changes nothing."""

    weight: Tensor
    sequence_dim: int | None
    arg_init_method: Init | None = None
    """The ``init_method`` that the constructor was given."""

    def stamp(self, tensor: Tensor, name: str) -> None:
        mark(tensor, self.sharding_of(name))

    @property
    def tensor_parallel_group(self) -> Any:
        """The group that the layer is sharded over, as the backend's own object."""
        return self.tp.process_group

    @property
    def sequence_dimension(self) -> int | None:
        tokens = getattr(self, "tokens", None)
        return self.sequence_dim if tokens is None else int(tokens.dim)

    @property
    def sequence_parallel_enabled(self) -> bool:
        return self.sequence_dimension is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def init_weight_cpu(self) -> None:
        """``reset_parameters``, by the name under which ``param_init_fn`` of a script calls it."""
        self.reset_parameters()

    initialize_weight_and_bias = init_weight_cpu

    def _local(self, dim: int) -> int:
        return int(self.shard_specs["weight"].local_shape(self.tp.size)[dim])


class NormArguments:
    """A norm's arguments by their published names: those of the norm in tpcore, and these two for the last ones."""

    sequence_parallel: bool

    def __init__(
        self,
        *args: Any,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        **options: Any,
    ) -> None:
        options = {"sequence_parallel": sequence_parallel_enabled, "group": tensor_model_parallel_group} | options
        super().__init__(*args, **options)

    @property
    def sequence_parallel_enabled(self) -> bool:
        return self.sequence_parallel


class LayerNorm(NormArguments, layers.LayerNorm):
    """``tpcore.LayerNorm``; ``sequence_parallel_enabled`` is its ``sequence_parallel``."""


mirror(__name__, "parallel_layers.layer_norm")
