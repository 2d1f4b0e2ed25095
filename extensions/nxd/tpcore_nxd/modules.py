"""Query, key and value projections, and the norm, under their published names, sizes and parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcore import layers
from tpcore.comm import mappings as ops
from tpcore.layers.features import Copies
from tpcore.layers.fused import enter
from tpcore.layers.initial import Init, kaiming_uniform, uniform_bias, unsharded
from tpcore.layout.shard import Block, ShardSpec

from .parallel_layers.attributes import NormArguments, Place, PublishedAttributes
from .paths import mirror

__all__ = ["GQAQKVColumnParallelLinear", "RMSNorm"]


class RMSNorm(NormArguments, layers.RMSNorm):
    """``tpcore.RMSNorm``; ``sequence_parallel_enabled`` is its ``sequence_parallel``."""


class GQAQKVColumnParallelLinear(PublishedAttributes):
    """``(q, k, v)`` of one input, of which each rank computes its part of the features.

    ``output_sizes``: features of q, and of k (those of v are as many). ``kv_size_multiplier``: so many consecutive
    ranks hold the same part of k and v, rank r part ``r // kv_size_multiplier`` in the model's own order of heads, and
    the gradients of its weights are summed over them. Parameters are ``weight_qkv`` with ``fuse_qkv``, else
    ``weight_q``, ``weight_k`` and ``weight_v``, and biases alike; with ``keep_master_weight`` the full initial weights
    are ``master_weight_qkv`` and so on, on the CPU. Input ``[..., input_size]``, the same on every rank, or with
    sequence parallelism this rank's chunk along dim 0. ``gather_output``: all features of each, keys and values once.
    ValueError for sizes that do not divide.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype | None = torch.float32,
        device: Place = None,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.input_size, self.output_sizes = input_size, list(output_sizes)
        self.gather_output, self.fuse_qkv, self.use_bias = gather_output, fuse_qkv, bias
        self.kv_size_multiplier, self.arg_init_method = kv_size_multiplier, init_method
        self.sequence_dim = 0 if sequence_parallel_enabled else None
        self.copy = partial(enter, spec=(self.tp, self.sequence_dim, reduce_dtype))
        q, kv = self._blocks()
        self.q_output_size_per_partition, self.kv_output_size_per_partition = q.unit, kv.unit
        parts = {"qkv": (q, kv, kv)} if fuse_qkv else {"q": (q,), "k": (kv,), "v": (kv,)}
        self.copies: dict[str, Copies | None] = {}
        for name, blocks in parts.items():
            cut = ShardSpec((sum(block.size for block in blocks),), 0, blocks)
            self.copies[name] = Copies.of(cut, self, reduce_dtype)
            weight = ShardSpec((cut.shape[0], input_size), 0, blocks)
            init = init_method or kaiming_uniform
            if keep_master_weight:  # before the layer draws, from the same random state
                setattr(self, f"master_weight_{name}", unsharded(init, weight.shape, dtype))
            self.shard_parameter(f"weight_{name}", weight, init, dtype, device or None)
            if bias:
                self.shard_parameter(f"bias_{name}", cut, uniform_bias(input_size), dtype, device or None)
            else:
                self.register_parameter(f"bias_{name}", None)

    def _blocks(self) -> tuple[Block, Block]:
        """The blocks of q and of k or v: one unit for each rank, or for each run of ranks."""
        tp, times, (q, kv) = self.tp.size, self.kv_size_multiplier, self.output_sizes
        if times < 1 or tp % times or q % tp or kv % (tp // times):
            raise ValueError(
                f"GQAQKVColumnParallelLinear: tp={tp}, kv_size_multiplier={times}, output_sizes={[q, kv]}: "
                "the multiplier must divide tp, tp the features of q, and tp / multiplier those of k"
            )
        return Block(q, q // tp), Block(kv, kv * times // tp, replicate=times > 1)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    initialize_weight_biases = PublishedAttributes.init_weight_cpu

    def _projected(self, name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, f"weight_{name}"), getattr(self, f"bias_{name}")
        copies = self.copies[name]
        if copies is not None:
            weight, bias = copies(weight, 0), None if bias is None else copies(bias, 0)
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.copy(x)
        kv = self.kv_output_size_per_partition
        if self.fuse_qkv:
            y = self._projected("qkv", x)
            q, k, v = y.split([self.q_output_size_per_partition, kv, kv], -1)
        else:
            q, k, v = (self._projected(name, x) for name in "qkv")
        if not self.gather_output:
            return q, k, v
        return ops.collect(q, self.tp), self._once(k), self._once(v)

    def _once(self, t: Tensor) -> Tensor:
        """All features of k or v: the first part of each run of equal parts."""
        runs = ops.collect(t, self.tp).unflatten(-1, (-1, self.kv_size_multiplier, t.shape[-1]))
        first: Tensor = runs[..., 0, :].flatten(-2)
        return first

    def extra_repr(self) -> str:
        sizes = f"{self.input_size}, {self.output_sizes}"
        return f"{sizes}, kv_size_multiplier={self.kv_size_multiplier}, tp={self.tp.size}"


mirror(__name__, "modules.qkv_linear", "modules.rms_norm")
