"""Attributes of layers by the names that published scripts read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .initial import Init
from .module import ParallelModule


class PublishedAttributes(ParallelModule):
    """The attributes of every layer with a cut weight. They are for reading: setting one changes nothing."""

    weight: Tensor
    sequence_dim: int | None
    arg_init_method: Init | None = None
    """The ``init_method`` that the constructor was given."""

    @property
    def tensor_parallel_group(self) -> Any:
        """The group that the layer is cut over, as the backend's own object."""
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

    def initialize_weight_and_bias(self) -> None:
        self.reset_parameters()


class LinearAttributes(PublishedAttributes):
    transposed: bool = False
    """Whether the weight is ``[inputs, outputs]``."""

    @property
    def stride(self) -> int:
        """How many projections are fused along the cut features."""
        return len(self.shard_specs["weight"].blocks)

    def _local(self, feature: int) -> int:
        shape = self.shard_specs["weight"].local_shape(self.tp.size)
        return int(shape[feature ^ self.transposed])

    @property
    def output_size_per_partition(self) -> int:
        return self._local(0)

    @property
    def input_size_per_partition(self) -> int:
        return self._local(1)


class EmbeddingAttributes(PublishedAttributes):
    @property
    def num_embeddings_per_partition(self) -> int:
        return int(self.shard_specs["weight"].local_shape(self.tp.size)[0])

    @property
    def embedding_dim_per_partition(self) -> int:
        return int(self.shard_specs["weight"].local_shape(self.tp.size)[1])

    @property
    def start_index(self) -> int:
        """The first row of the table that this rank holds."""
        cut_rows = self.shard_specs["weight"].dim == 0
        return self._tp_rank * self.num_embeddings_per_partition if cut_rows else 0

    @property
    def end_index(self) -> int:
        """One past its last row, padding included."""
        return self.start_index + self.num_embeddings_per_partition
