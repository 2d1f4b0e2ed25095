"""Linear layers cut by output (column) or input (row) features.

``Y = X A^T`` with A cut by rows of the torch weight (Megatron-LM calls that column parallel, after the
paper's ``Y = X A``) needs no communication forward and sums input gradients backward; cut by columns of
the torch weight it sums outputs forward. Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..fused import column_linear, row_linear
from ..shard import ShardSpec
from .initial import Init
from .module import Device, ParallelModule

Result = Tensor | tuple[Tensor, Tensor | None]


def _default_weight(t: Tensor) -> Tensor:
    return nn.init.kaiming_uniform_(t, a=math.sqrt(5))  # as nn.Linear does


def _default_bias(fan_in: int) -> Init:
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return lambda t: nn.init.uniform_(t, -bound, bound)


class _ParallelLinear(ParallelModule):
    """What the two cuts share: sizes, options, the two parameters."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        cut: int,
        bias: bool,
        dtype: torch.dtype,
        device: Device,
        stride: int,
        init_method: Init | None,
        sequence_dim: int | None,
        skip_bias_add: bool,
        pad: bool,
        reduce_dtype: torch.dtype,
        group: Any,
        keep_master_weight: bool,
    ) -> None:
        super().__init__(group)
        self.input_size, self.output_size = input_size, output_size
        self.sequence_dim, self.skip_bias_add, self.reduce_dtype = sequence_dim, skip_bias_add, reduce_dtype
        spec = ShardSpec.strided((output_size, input_size), cut, stride)
        self.padded = spec.padded(self.tp.size)
        if self.padded and not pad:
            name, size = ("output_size", output_size) if cut == 0 else ("input_size", input_size)
            parts = f" in {stride} parts" if stride > 1 else ""
            raise ValueError(
                f"{type(self).__name__}: {name}={size}{parts} is not divisible by tp={self.tp.size}; "
                "pass pad=True to pad it with zeros that never show"
            )
        init = init_method or _default_weight
        if keep_master_weight:  # before drawing for real, so that it costs no random numbers
            self.master_weight = self._unsharded(init, spec, dtype)
        self.shard_parameter("weight", spec, init, dtype, device)
        if bias:
            bias_spec = (
                ShardSpec.strided((output_size,), 0, stride) if cut == 0 else ShardSpec((output_size,))
            )
            self.shard_parameter("bias", bias_spec, _default_bias(input_size), dtype, device)
        else:
            self.register_parameter("bias", None)

    @staticmethod
    def _unsharded(init: Init, spec: ShardSpec, dtype: torch.dtype) -> Tensor:
        state = torch.get_rng_state()
        full = torch.empty(spec.shape, dtype=dtype, device="cpu")
        with torch.no_grad():
            init(full)
        torch.set_rng_state(state)
        return full

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"{self._shapes()}"
        )


def _sequence_dim(enabled: bool, dim: int | None) -> int | None:
    """One value for the two published arguments; the published default dimension is 0."""
    if dim is not None and not enabled:
        raise ValueError(f"sequence_dimension={dim} without sequence_parallel_enabled=True has no meaning")
    return (0 if dim is None else dim) if enabled else None


class ColumnParallelLinear(_ParallelLinear):
    """``y_r = x @ w_r.T + b_r``: each rank computes some of the output features.

    Input ``[..., input_size]``, the same on every rank (with sequence parallelism: this rank's chunk along
    ``sequence_dimension``). Output ``[..., output_size]`` if ``gather_output``, else this rank's features.
    Weight and bias start as those of ``nn.Linear`` with the same seed, at any tp degree.

    ``stride``: that many projections are fused along the output, each cut by itself (q|k|v: 3).
    ``pad``: allow an output size that tp does not divide. ``skip_bias_add``: return ``(y, bias)`` and do
    not add it. ``reduce_dtype``: the least precision to sum input gradients in. ``keep_master_weight``:
    keep the full initial weight as ``master_weight`` on the CPU.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        *,
        stride: int = 1,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        keep_master_weight: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            cut=0,
            bias=bias,
            dtype=dtype,
            device=device,
            stride=stride,
            init_method=init_method,
            sequence_dim=_sequence_dim(sequence_parallel_enabled, sequence_dimension),
            skip_bias_add=skip_bias_add,
            pad=pad,
            reduce_dtype=reduce_dtype,
            group=tensor_model_parallel_group,
            keep_master_weight=keep_master_weight,
        )
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Result:
        bias = None if self.skip_bias_add else self.bias
        y = column_linear(x, self.weight, bias, self.tp, self.sequence_dim, self.reduce_dtype)
        if self.gather_output:
            y = self._gather(y)
        elif self.padded:
            y = self._mask(y)
        if not self.skip_bias_add:
            return y
        bias = self.bias
        if bias is not None and self.gather_output:
            bias = self._gather(bias)
        elif bias is not None and self.padded:
            bias = self._mask(bias)
        return y, bias

    def _gather(self, y: Tensor) -> Tensor:
        """All output features, in their unsharded order, without padding."""
        y = ops.gather(y, self.tp, -1)
        spec, n = self.shard_specs["weight"], self.tp.size
        return y if spec.contiguous(n) else y.index_select(-1, spec.gathered_index(n).to(y.device))


class RowParallelLinear(_ParallelLinear):
    """``y = sum over ranks of x_r @ w_r.T, + b``: each rank consumes some of the input features.

    Input: this rank's features if ``input_is_parallel``, else ``[..., input_size]``, cut here. Output
    ``[..., output_size]``, the same on every rank (with sequence parallelism: this rank's chunk along
    ``sequence_dimension``). The bias is replicated and added once, after the sum.

    ``reduce_output=False`` leaves the partial sums to the caller; options otherwise as in
    ``ColumnParallelLinear``, ``stride`` and ``pad`` about the input size, ``reduce_dtype`` about outputs.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        *,
        stride: int = 1,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        keep_master_weight: bool = False,
    ) -> None:
        sequence_dim = _sequence_dim(sequence_parallel_enabled, sequence_dimension)
        if not reduce_output and bias and not skip_bias_add:
            raise ValueError(
                "RowParallelLinear(reduce_output=False) would add the bias once per rank: "
                "pass bias=False, or skip_bias_add=True and add it after your own sum"
            )
        if sequence_dim is not None and not (reduce_output and input_is_parallel):
            raise ValueError(
                "RowParallelLinear with sequence parallelism needs input_is_parallel=True "
                f"and reduce_output=True, not {input_is_parallel} and {reduce_output}"
            )
        super().__init__(
            input_size,
            output_size,
            cut=1,
            bias=bias,
            dtype=dtype,
            device=device,
            stride=stride,
            init_method=init_method,
            sequence_dim=sequence_dim,
            skip_bias_add=skip_bias_add,
            pad=pad,
            reduce_dtype=reduce_dtype,
            group=tensor_model_parallel_group,
            keep_master_weight=keep_master_weight,
        )
        self.input_is_parallel, self.reduce_output = input_is_parallel, reduce_output

    def _scatter(self, x: Tensor) -> Tensor:
        """This rank's input features, in the order its weight has them."""
        spec, n = self.shard_specs["weight"], self.tp.size
        if not spec.contiguous(n):
            # laid out as the shards are, one beside the other; padding takes any feature and is masked below
            x = x.index_select(-1, spec.source_index(n).flatten().clamp(min=0).to(x.device))
        return ops.scatter(x, self.tp, -1)

    def forward(self, x: Tensor) -> Result:
        if not self.input_is_parallel:
            x = self._scatter(x)
        if self.padded:
            x = self._mask(x)
        if self.reduce_output:
            bias = None if self.skip_bias_add else self.bias
            y = row_linear(x, self.weight, bias, self.tp, self.sequence_dim, self.reduce_dtype)
        else:
            y = F.linear(x, self.weight)
        if not self.skip_bias_add:
            return y
        if self.bias is None or self.sequence_dim is None:
            return y, self.bias
        # whoever adds it does so to this rank's tokens only, so its gradient has to be summed
        return y, ops.copy(self.bias, self.tp, dtype=self.reduce_dtype)
