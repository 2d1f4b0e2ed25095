"""The sharded layers by their NeuronX Distributed path: its arguments, attributes and marks on parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpcore import layers
from tpcore.layers.initial import Init, unsharded
from tpcore.layers.linear import ParallelLinear
from tpcore.layout.shard import ShardSpec
from tpcore.runtime.context import current

from .attributes import Place, PublishedAttributes, sequence_dim
from .utils import copy_tensor_model_parallel_attributes, param_is_not_tensor_parallel_duplicate

__all__ = ["BaseParallelLinear", "ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]
__all__ += ["copy_tensor_model_parallel_attributes", "create_local_weight", "param_is_not_tensor_parallel_duplicate"]

Options = dict[str, Any]


class BaseParallelLinear(PublishedAttributes, ParallelLinear):
    """Base of both linear layers. ``master_weight``: the full initial weight on the CPU, if it was asked for."""

    master_weight: Tensor

    @property
    def input_size(self) -> int:
        return self.in_features

    @property
    def output_size(self) -> int:
        return self.out_features

    @property
    def stride(self) -> int:
        """How many projections are fused along the sharded features."""
        return len(self.shard_specs["weight"].blocks)

    @property
    def output_size_per_partition(self) -> int:
        return self._local(0)

    @property
    def input_size_per_partition(self) -> int:
        return self._local(1)

    @classmethod
    def from_plain(cls, plain: nn.Module, **options: Any) -> Any:
        layer = super().from_plain(plain, **options)
        if hasattr(layer, "master_weight"):
            layer.master_weight = plain.weight.detach().cpu()  # type: ignore[operator]
        return layer

    def _keep(self, master_weight: Tensor | None, init_method: Init | None) -> None:
        self.arg_init_method = init_method
        if master_weight is not None:
            self.master_weight = master_weight


def _master_weight(
    keep: bool, layer: type[ParallelLinear], sizes: tuple[int, int], init: Init | None, dtype: torch.dtype | None
) -> Tensor | None:
    """Before the layer draws: from the same random state, which is restored."""
    return unsharded(init or layer.form.initial_weight, sizes, dtype) if keep else None


class ColumnParallelLinear(BaseParallelLinear, layers.ColumnParallelLinear):
    """``tpcore.ColumnParallelLinear`` with NeuronX Distributed's arguments. ``stride``: ``blocks`` as a number.
    ``sequence_dimension``: None is dim 0 with ``sequence_parallel_enabled``. ``pad_alignment_size_per_rank`` and
    ``keep_padded_output`` are about padding, and have their defaults where there is any."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype | None = torch.float32,
        device: Place = None,
        *,
        stride: int = 1,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: Any = None,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
    ) -> None:
        if pad and (pad_alignment_size_per_rank != 1 or keep_padded_output):
            raise ValueError(
                f"ColumnParallelLinear(pad=True, pad_alignment_size_per_rank={pad_alignment_size_per_rank}, "
                f"keep_padded_output={keep_padded_output}): ranks get equal parts and a gathered output has no "
                "padding; leave these two out, or give output_size rounded up"
            )
        master = _master_weight(keep_master_weight, type(self), (output_size, input_size), init_method, dtype)
        tokens = sequence_dim(sequence_parallel_enabled, sequence_dimension)
        options: Options = {"skip_bias_add": skip_bias_add, "pad": pad, "reduce_dtype": reduce_dtype}
        options |= {"blocks": stride, "init_method": init_method, "group": tensor_model_parallel_group}
        place = device or None
        super().__init__(input_size, output_size, bias, gather_output, dtype, place, sequence_dim=tokens, **options)
        self._keep(master, init_method)


class RowParallelLinear(BaseParallelLinear, layers.RowParallelLinear):
    """``tpcore.RowParallelLinear`` with NeuronX Distributed's arguments, as ``ColumnParallelLinear`` has them.
    ``reduce_output=False`` returns this rank's partial sum."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype | None = torch.float32,
        device: Place = None,
        *,
        stride: int = 1,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: Any = None,
    ) -> None:
        tokens = sequence_dim(sequence_parallel_enabled, sequence_dimension)
        if not reduce_output and (tokens is not None or (bias and not skip_bias_add)):
            raise ValueError(
                f"RowParallelLinear(reduce_output=False, bias={bias}, skip_bias_add={skip_bias_add}, "
                f"sequence_parallel_enabled={tokens is not None}): a partial sum has all tokens, and would get the "
                "bias once per rank: pass bias=False, or skip_bias_add=True and add it after your own sum"
            )
        master = _master_weight(keep_master_weight, type(self), (output_size, input_size), init_method, dtype)
        options: Options = {"skip_bias_add": skip_bias_add, "pad": pad, "reduce_dtype": reduce_dtype}
        options |= {"blocks": stride, "init_method": init_method, "group": tensor_model_parallel_group}
        place = device or None
        super().__init__(input_size, output_size, bias, input_is_parallel, dtype, place, sequence_dim=tokens, **options)
        self.reduce_output = reduce_output
        self._keep(master, init_method)

    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._matmul(x, weight, bias) if self.reduce_output else self.product(x, weight, None)


class ParallelEmbedding(PublishedAttributes, layers.ParallelEmbedding):
    """``tpcore.ParallelEmbedding`` with NeuronX Distributed's arguments, for ids of ``[batch, sequence]`` in models
    whose activations are ``[sequence, batch, hidden]``.

    With ``sequence_parallel_enabled=True`` and no ``sequence_dimension``, or 0, the output is
    ``[sequence / tp, batch, hidden]``: this rank's tokens of every sample. ``sequence_dimension=1`` gives
    ``[batch, sequence / tp, hidden]``. ``collect_output=False``: this rank's partial sums or columns. ``use_spmd_rank``
    changes nothing: one program serves all ranks. A callable as
    third argument is taken as ``init_method``, followed by dtype and device.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | Init | None = None,
        max_norm: Any = None,
        norm_type: Any = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Init | None = None,
        device: Place = None,
        dtype: torch.dtype | None = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        *,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
        use_spmd_rank: bool = False,
    ) -> None:
        if callable(padding_idx):  # order of the first release: (num, dim, init_method, dtype, device)
            init_method, padding_idx = padding_idx, None
            if isinstance(max_norm, torch.dtype):
                dtype, max_norm = max_norm, None
            if norm_type is None or norm_type is False or isinstance(norm_type, torch.device | str):
                device, norm_type = (device if norm_type is None else norm_type), 2.0
            if max_norm is not None or norm_type != 2.0:
                call = "ParallelEmbedding(num_embeddings, embedding_dim, init_method, dtype, device)"
                raise TypeError(f"{call}: got {max_norm!r} and {norm_type!r} after init_method")
        tokens = sequence_dim(sequence_parallel_enabled, sequence_dimension)
        if not collect_output and tokens is not None:
            why = "leaves the sum to the caller, and sequence parallelism is part of it"
            raise ValueError(f"collect_output=False {why}: leave out sequence_parallel_enabled")
        options: Options = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse, "init_method": init_method}
        options |= {"shard_across_embedding": shard_across_embedding, "pad": pad, "dtype": dtype}
        options |= {"device": device or None, "group": tensor_model_parallel_group}
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, sequence_dim=tokens, **options)
        self.norm_type, self.collect_output, self.arg_init_method = norm_type, collect_output, init_method

    @property
    def num_embeddings_per_partition(self) -> int:
        return self._local(0)

    @property
    def embedding_dim_per_partition(self) -> int:
        return self._local(1)

    @property
    def start_index(self) -> int:
        """The first row of the table that this rank holds."""
        cut_rows = self.shard_specs["weight"].dim == 0
        return self._tp_rank * self.num_embeddings_per_partition if cut_rows else 0

    @property
    def end_index(self) -> int:
        """One past its last row, padding included."""
        return self.start_index + self.num_embeddings_per_partition

    def forward(self, ids: Tensor) -> Tensor:
        sequence_first = self.sequence_dim == 0 and ids.ndim == 2
        return super().forward(ids.transpose(0, 1).contiguous() if sequence_first else ids)


@torch.no_grad()
def create_local_weight(
    full_weight: Tensor, partition_dim: int, per_partition_size: int, stride: int, out_weight: Tensor | None = None
) -> Tensor:
    """This tp rank's shard of ``full_weight`` along ``partition_dim``, of ``stride`` fused parts each.

    Into ``out_weight`` if given. ValueError where tp shards of ``per_partition_size`` are not the whole.
    """
    tp, rank = current().comm("tp"), current().coord("tp")
    spec = ShardSpec.strided(tuple(full_weight.shape), partition_dim, stride)
    if per_partition_size * tp.size != full_weight.shape[partition_dim]:
        raise ValueError(
            f"create_local_weight: {tp.size} shards of {per_partition_size} are not dim {partition_dim} of "
            f"shape {tuple(full_weight.shape)}"
        )
    local = spec.shard(full_weight, rank, tp.size)
    return local if out_weight is None else out_weight.copy_(local)
