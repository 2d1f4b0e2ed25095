"""Linear layers sharded by output features (column parallel) or input features (row parallel).

The names are Megatron-LM's, after ``Y = X A`` in the paper. Column parallel cuts rows of the torch weight: no
communication in forward, and backward sums the input gradients. Row parallel cuts columns of the torch
weight: forward sums the outputs. Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..layout.shard import Block, ShardSpec
from .copies import Copies
from .features import Features, mark_unpadded, marked_like
from .fused import column_linear, row_linear
from .initial import Init, unsharded
from .module import Device
from .options import cut_features, sequence_dim, tokens_over
from .plain import checked_plain, filled
from .quantized import QuantizableLinear
from .widths import refuse_width

Result = Tensor | tuple[Tensor, Tensor | None]

Linear = TypeVar("Linear", bound="ParallelLinear")


@dataclass(frozen=True)
class WeightForm:
    """Layout and initial values of the weight in a kind of plain module."""

    sizes: Callable[[nn.Module, type[nn.Module]], tuple[int, int]]
    """(inputs, outputs) of a plain module. ValueError, naming the layer, for a module of another kind."""
    initial_weight: Init
    initial_bias: Callable[[int], Init]  # takes the number of inputs
    transposed: bool = False  # whether the weight is [inputs, outputs]


def _sizes(plain: nn.Module, layer: type[nn.Module]) -> tuple[int, int]:
    linear = checked_plain(plain, nn.Linear, layer)
    return linear.in_features, linear.out_features


def _initial_weight(t: Tensor) -> Tensor:
    return nn.init.kaiming_uniform_(t, a=math.sqrt(5))  # as nn.Linear does


def _initial_bias(fan_in: int) -> Init:
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return lambda t: nn.init.uniform_(t, -bound, bound)


class ParallelLinear(QuantizableLinear):
    """Base of both layers: sizes, weight and bias, conversion from a plain module."""

    form: ClassVar[WeightForm] = WeightForm(_sizes, _initial_weight, _initial_bias)
    bias: Tensor | None
    skip_bias_add: bool
    reduce_dtype: torch.dtype
    sequence_dim: int | None

    def __init__(self, input_size: int, output_size: int, group: Any) -> None:
        super().__init__(group)
        self.input_size, self.output_size = input_size, output_size

    @classmethod
    def from_plain(cls: type[Linear], plain: nn.Module, **options: Any) -> Linear:
        """This rank's part of a plain module: same values, dtype, device, requires_grad and training flag.

        ``options``: constructor arguments except sizes, bias, dtype, device and init_method. A module on meta
        stays on meta. Tied parameters must be tied again by the caller. ValueError for a module of another
        kind, and without ``pad=True`` for a size that tp does not divide.
        """
        inputs, outputs = cls.form.sizes(plain, cls)
        weight, bias = plain.weight, plain.bias is not None
        # init_method is passed here, so that one among the options is a TypeError instead of ignored
        own = {"bias": bias, "dtype": weight.dtype, "device": "meta", "init_method": None}
        layer = cls(inputs, outputs, **own, **options)
        if hasattr(layer, "master_weight"):
            layer.master_weight = weight.detach().cpu()  # type: ignore[operator]
        return filled(layer, plain)

    def _declare(
        self,
        cut: ShardSpec,
        cut_output: bool,
        bias: bool,
        init_method: Init | None,
        dtype: torch.dtype | None,
        device: Device,
        keep_master_weight: bool,
    ) -> None:
        """Register weight and bias. ``cut``: the spec of the output features, or of the input features."""
        self.features = Features.of(cut, self.tp.size)
        self.copies = Copies.of(cut, self, self.reduce_dtype)
        self.arg_init_method, self.transposed = init_method, self.form.transposed
        inputs, outputs, transposed = self.input_size, self.output_size, self.transposed
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        spec = ShardSpec(shape, int(cut_output == transposed), cut.blocks)
        init = init_method or self.form.initial_weight
        if keep_master_weight:  # before shard_parameter, and with the random state restored: the same numbers
            self.master_weight = unsharded(init, spec.shape, dtype)
        self.shard_parameter("weight", spec, init, dtype, device)
        if bias:
            bias_spec = cut if cut_output else ShardSpec((outputs,))
            self.shard_parameter("bias", bias_spec, self.form.initial_bias(inputs), dtype, device)
        else:
            self.register_parameter("bias", None)
        self.register_parameter("weight_scale", None)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"{self._shapes()}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``y_r = x @ w_r.T + b_r``: each rank computes some of the output features.

    Input ``[..., input_size]``, the same on every rank (with sequence parallelism: this rank's chunk along
    ``sequence_dimension``; None is dim 0). Output ``[..., output_size]`` if ``gather_output``, else this
    rank's features. Weight and bias have the initial values of ``nn.Linear`` for the same seed, at any tp
    degree.

    - ``stride``: number of equal projections that are fused along the output and cut separately (q|k|v: 3).
    - ``blocks``: the same for projections of several sizes, each a ``tpcore.Block``. The gradients of
      replicated blocks are summed over the ranks that hold them.
    - ``unit``: features that stay on one rank (head_dim); ValueError if tp does not divide the units.
    - ``pad``: allow an output size that tp does not divide.
    - ``input_is_copied``: the input comes from ``ops.copy``, or from ``ops.all_gather`` of tokens. Its
      gradient is then summed there, once for all layers that read the input (``tpcore.share_input``).
    - ``sequence_parallel_group``: the part of the layer's ranks that the tokens are spread over, such as tp
      for a head cut over pp and tp.
    - ``skip_bias_add``: return ``(y, bias)`` without adding the bias.
    - ``reduce_dtype``: lowest precision for sums of input gradients.
    - ``keep_master_weight``: keep the full initial weight as ``master_weight`` on the CPU.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype | None = torch.float32,
        device: Device = None,
        *,
        stride: int = 1,
        blocks: Sequence[Block] | None = None,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        keep_master_weight: bool = False,
        input_is_copied: bool = False,
        sequence_parallel_group: Any = None,
        unit: int = 1,
    ) -> None:
        super().__init__(input_size, output_size, tensor_model_parallel_group)
        self.gather_output, self.skip_bias_add, self.reduce_dtype = gather_output, skip_bias_add, reduce_dtype
        self.sequence_dim = sequence_dim(sequence_parallel_enabled, sequence_dimension)
        self.input_is_copied = input_is_copied
        if input_is_copied and sequence_parallel_enabled:
            raise ValueError(
                f"{type(self).__name__}(input_is_copied=True) gets all tokens and gathers none: "
                "leave out sequence_parallel_enabled, and let ops.all_gather make the copy"
            )
        self.tokens = tokens_over(self, self.sequence_dim, sequence_parallel_group)
        if self.tokens is not None:
            self.input_is_copied, self.sequence_dim = True, None
        cut = cut_features(self, "output_size", stride, blocks, pad, unit)
        self._declare(cut, True, bias, init_method, dtype, device, keep_master_weight)

    def forward(self, x: Tensor) -> Result:
        if x.shape[-1] != self.input_size:
            refuse_width(self, self.input_size, x, self.input_size)
        if self.checks is not None and self.sequence_dim is None and self.tokens is None:
            self.look_alike("the input", x)
        weight, bias = self.weight, self.bias
        if self.copies is not None:
            weight = self.copies(weight, int(self.transposed))
            bias = None if bias is None else self.copies(bias, 0)
        if self.transposed:
            weight = weight.t()
        added = None if self.skip_bias_add else bias
        if self.tokens is not None:
            x = self.tokens.gathered(x, self.reduce_dtype)
        if self.input_is_copied:
            y = self.product(x, weight, added)
        else:
            y = column_linear(x, weight, added, self.tp, self.sequence_dim, self.reduce_dtype, self.weight_scale)
        if self.gather_output or self.features.padded:
            y = self.outputs(y)
            bias = self.outputs(bias) if self.skip_bias_add and bias is not None else bias
        if not self.gather_output and self.checks is not None:
            y = marked_like(self.as_part(y, -1, "features"), y)
        return (y, bias) if self.skip_bias_add else y

    def outputs(self, y: Tensor) -> Tensor:
        """All output features if ``gather_output``, else this rank's with its padding zeroed."""
        if not self.gather_output:
            y = self.features.mask(y, self.tp)
            mark_unpadded(y, self.output_size)
            return y
        y = ops.gather(y, self.tp, -1)
        return y if self.features.plain else self.features.restored(y)


class RowParallelLinear(ParallelLinear):
    """``y = sum over ranks of x_r @ w_r.T, + b``: each rank consumes some of the input features.

    Input: this rank's features if ``input_is_parallel``, else ``[..., input_size]``, which is cut here.
    Output ``[..., output_size]``, the same on every rank (with sequence parallelism: this rank's chunk along
    ``sequence_dimension``; None is dim 0). The bias is replicated and added once, after the sum.

    ``reduce_output=False`` returns this rank's partial sum. The other options are those of
    ``ColumnParallelLinear``; ``stride``, ``blocks``, ``unit`` and ``pad`` apply to the input size, and
    ``reduce_dtype`` to sums of outputs.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype | None = torch.float32,
        device: Device = None,
        *,
        stride: int = 1,
        blocks: Sequence[Block] | None = None,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        keep_master_weight: bool = False,
        unit: int = 1,
    ) -> None:
        super().__init__(input_size, output_size, tensor_model_parallel_group)
        self.input_is_parallel, self.reduce_output = input_is_parallel, reduce_output
        self.skip_bias_add, self.reduce_dtype = skip_bias_add, reduce_dtype
        self.sequence_dim = sequence_dim(sequence_parallel_enabled, sequence_dimension)
        if not reduce_output and bias and not skip_bias_add:
            raise ValueError(
                f"{type(self).__name__}(reduce_output=False) would add the bias once per rank: "
                "pass bias=False, or skip_bias_add=True and add it after your own sum"
            )
        if self.sequence_dim is not None and not (reduce_output and input_is_parallel):
            raise ValueError(
                f"{type(self).__name__} with sequence parallelism needs input_is_parallel=True "
                f"and reduce_output=True, not {input_is_parallel} and {reduce_output}"
            )
        if any(Block(*block).replicate for block in blocks or ()):
            raise ValueError(
                f"{type(self).__name__}: blocks={tuple(blocks or ())} replicate input features: the sum over "
                "ranks would count them once for each copy; pass replicate=False"
            )
        cut = cut_features(self, "input_size", stride, blocks, pad, unit)
        self._declare(cut, False, bias, init_method, dtype, device, keep_master_weight)

    def forward(self, x: Tensor) -> Result:
        weight, bias = self.weight, self.bias
        if self.transposed:
            weight = weight.t()
        takes = weight.shape[-1] if self.input_is_parallel else self.input_size
        if x.shape[-1] != takes:
            refuse_width(self, self.input_size, x, takes, parallel=self.input_is_parallel)
        if not self.input_is_parallel:
            x = self.features.scatter(x, self.tp)
        if self.features.padded:
            x = self.features.mask(x, self.tp)
        if self.reduce_output:
            added = None if self.skip_bias_add else bias
            y = row_linear(x, weight, added, self.tp, self.sequence_dim, self.reduce_dtype, self.weight_scale)
            if self.sequence_dim is not None:
                y = self.as_part(y, self.sequence_dim, "tokens")
        else:
            y = self.product(x, weight, None)
        if not self.skip_bias_add:
            return y
        if bias is None or self.sequence_dim is None:
            return y, bias
        # the caller adds it to this rank's tokens only, so its gradient is summed over the ranks
        return y, ops.copy(bias, self.tp, dtype=self.reduce_dtype)
