"""Linear layers sharded by output features (column parallel) or input features (row parallel).

The names are Megatron-LM's, after ``Y = X A`` in the paper. Column parallel cuts rows of the torch weight: no
communication in forward, and backward sums the input gradients. Row parallel cuts columns of the torch
weight: forward sums the outputs. Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..layout.shard import Block, ShardSpec
from .adopt import checked_plain, filled
from .blocks import linear_of
from .features import Blocks, Copies, Features, check_tokens_dim, cut_features, refuse_width, tokens_over
from .initial import Init, kaiming_uniform, uniform_bias
from .module import Device
from .quantized import QuantizableLinear
from .tokens import TokenRegion

Result = Tensor | tuple[Tensor, Tensor | None]
Linear = TypeVar("Linear", bound="ParallelLinear")


class WeightForm(NamedTuple):
    """Layout and initial values of the weight in a kind of plain module."""

    sizes: Callable[[nn.Module, type[nn.Module]], tuple[int, int]]
    """(inputs, outputs) of a plain module. ValueError, naming the layer, for a module of another kind."""
    initial_weight: Init
    initial_bias: Callable[[int], Init]  # takes the number of inputs
    transposed: bool = False  # whether the weight is [inputs, outputs]


def _linear_sizes(plain: nn.Module, layer: type[nn.Module]) -> tuple[int, int]:
    linear = checked_plain(plain, nn.Linear, layer)
    return int(linear.in_features), int(linear.out_features)  # which some models give as tensors


class ParallelLinear(QuantizableLinear):
    """Base of both layers: sizes, weight and bias, conversion from a plain module."""

    plain_type: type[nn.Module] = nn.Linear
    form: ClassVar[WeightForm] = WeightForm(_linear_sizes, kaiming_uniform, uniform_bias)
    bias: Tensor | None
    skip_bias_add: bool
    reduce_dtype: torch.dtype
    sequence_dim: int | None

    def __init__(self, in_features: int, out_features: int, group: Any) -> None:
        super().__init__(group)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_plain(cls: type[Linear], plain: nn.Module, **options: Any) -> Linear:
        """This rank's part of a plain module: same values, dtype, device, requires_grad and training flag.

        ``options``: constructor arguments except sizes, bias, dtype, device and init_method. A module on meta
        stays on meta. Tied parameters must be tied again by the caller. ValueError for a module of another
        kind, and without ``pad=True`` for a size that tp does not divide.
        """
        inputs, outputs = cls.form.sizes(plain, cls)
        # init_method is passed here, so that one among the options is a TypeError instead of ignored
        arguments = {"bias": plain.bias is not None, "dtype": plain.weight.dtype, "device": "meta", "init_method": None}
        return filled(cls(inputs, outputs, **arguments, **options), plain)

    def _declare(
        self,
        cut: ShardSpec,
        side: int,
        bias: ShardSpec | None,
        init_method: Init | None,
        dtype: torch.dtype | None,
        device: Device,
    ) -> None:
        """Register weight and bias. ``cut``: of the output features (``side`` 0), or of the input features (1)."""
        self.features = Features.of(cut, self.tp.size)
        self._linear = linear_of(self, cut, side)
        self.copies = Copies.of(cut, self, self.reduce_dtype)
        self.transposed = self.form.transposed
        shape = self.out_features, self.in_features
        spec = ShardSpec(shape[::-1] if self.transposed else shape, side ^ self.transposed, cut.blocks)
        self.shard_parameter("weight", spec, init_method or self.form.initial_weight, dtype, device)
        self.register_parameter("bias", None)
        if bias is not None:
            self.shard_parameter("bias", bias, self.form.initial_bias(self.in_features), dtype, device)
        self.register_parameter("weight_scale", None)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._shapes()}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``y_r = x @ w_r.T + b_r``: each rank computes some of the output features.

    Input ``[..., in_features]``, the same on every rank (with sequence parallelism this rank's chunk of the tokens).
    Output ``[..., out_features]`` if ``gather_output``, else this rank's features. Weight and bias have the initial
    values of ``nn.Linear`` for the same seed, at any tp degree.

    Args:
        in_features: size of the input's last dim.
        out_features: features of all ranks together.
        bias: whether to add a bias, sharded as the output is.
        gather_output: return the features of all ranks.
        dtype: of the parameters. None is torch's default.
        device: where to allocate; "meta" allocates nothing.
        blocks: how many equal projections are fused along the output and sharded separately (q|k|v: 3), or a
            ``tpcore.Block`` for each: its size, its features that stay on one rank (head_dim), and whether it is
            replicated where it has fewer units than ranks; the gradients of replicated blocks are then summed.
        init_method: fills the unsharded weight in place.
        sequence_dim: the dim of the input along which the tokens are spread over the ranks. A layer sharded over
            pipeline stages too has tokens spread over its other axes.
        skip_bias_add: return ``(y, bias)`` without adding the bias.
        pad: allow an ``out_features`` that tp does not divide.
        reduce_dtype: lowest precision for sums of input gradients.
        group: the ranks of the layer: a Comm, a process group, or None for the tp axis.
    """

    input_is_copied = False
    """Whether the input comes from ``mappings.copy`` or ``all_gather``, which sum its gradient once for all layers
    that read it (``tpcore.layers.share_input``)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype | None = torch.float32,
        device: Device = None,
        *,
        blocks: Blocks = 1,
        init_method: Init | None = None,
        sequence_dim: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        group: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, group)
        self.gather_output, self.skip_bias_add, self.reduce_dtype = gather_output, skip_bias_add, reduce_dtype
        self.tokens = tokens_over(self, sequence_dim)
        self.sequence_dim = sequence_dim if self.tokens is None else None
        self.input_is_copied = self.tokens is not None
        cut = cut_features(self, "out_features", blocks, pad)
        self.fused = len(cut.blocks) > 1  # features of several projections, each sharded by itself
        self._declare(cut, 0, cut if bias else None, init_method, dtype, device)

    def forward(self, x: Tensor) -> Result:
        x, weight, bias = self._enter(x), self.weight, self.bias
        if self.copies is not None:
            weight = self.copies(weight, int(self.transposed))
            bias = None if bias is None else self.copies(bias, 0)
        weight, added = weight.t() if self.transposed else weight, None if self.skip_bias_add else bias
        if self.input_is_copied:
            y = self.product(x, weight, added)
        else:
            y = self._linear(x, weight, added, (self.tp, self.sequence_dim, self.reduce_dtype), self.weight_scale)
        y = self.outputs(y)
        return (y, None if bias is None else self.outputs(bias)) if self.skip_bias_add else y

    def _enter(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            refuse_width(self, self.in_features, x, self.in_features)
        check_tokens_dim(self, self.tokens.dim if self.tokens is not None else self.sequence_dim, x.ndim)
        if self.tokens is not None:
            return self.tokens.gathered(x, self.reduce_dtype)
        if self.sequence_dim is None and not torch.compiler.is_compiling():
            # what needs no gradient in training is the program's: torch's pipelines ask for shapes with any memory
            first = self.tp.entrance in (0, self._number) and torch.is_grad_enabled() and not x.requires_grad
            (self.look_alike_first if first else self.look_alike)("the input", x)
        return x

    def outputs(self, y: Tensor) -> Tensor:
        """All output features if ``gather_output``, else this rank's with its padding zeroed."""
        if self.gather_output:
            return self.features.gathered(y, self.tp)
        y = self.as_part(self.features.mask(y, self.tp), -1, "fused features" if self.fused else "features")
        if self.features.padded or self.features.order is not None:
            setattr(y, ops.FEATURES, self.features)
        return y


class RowParallelLinear(ParallelLinear):
    """``y = sum over ranks of x_r @ w_r.T, + b``: each rank consumes some of the input features.

    Input: this rank's features if ``input_is_parallel``, else ``[..., in_features]``, which is sharded here. Output
    ``[..., out_features]``, the same on every rank (with sequence parallelism this rank's chunk of the tokens). The
    bias is replicated and added once, after the sum. Arguments that are not listed are ``ColumnParallelLinear``'s.

    Args:
        in_features: features of all ranks together.
        out_features: size of the output's last dim.
        bias: whether to add a bias.
        input_is_parallel: the input is this rank's features.
        blocks: as in ``ColumnParallelLinear``, of the input features; none is replicated.
        sequence_dim: the dim of the output along which the tokens are spread over the ranks.
        pad: allow an ``in_features`` that tp does not divide.
        reduce_dtype: lowest precision for sums of outputs.
    """

    region: TokenRegion | None = None
    """Which says in each call whether there is a ``sequence_dim``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype | None = torch.float32,
        device: Device = None,
        *,
        blocks: Blocks = 1,
        init_method: Init | None = None,
        sequence_dim: int | None = None,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        group: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, group)
        self.input_is_parallel, self.skip_bias_add, self.reduce_dtype = input_is_parallel, skip_bias_add, reduce_dtype
        self.sequence_dim = sequence_dim
        if sequence_dim is not None and not input_is_parallel:
            raise ValueError(f"{type(self).__name__}(sequence_dim={sequence_dim}) needs input_is_parallel=True")
        if not isinstance(blocks, int) and any(Block(*block).replicate for block in blocks):
            raise ValueError(
                f"{type(self).__name__}: blocks={tuple(blocks)} replicate input features: the sum over "
                "ranks would count them once for each copy; pass replicate=False"
            )
        cut = cut_features(self, "in_features", blocks, pad)
        self._takes = cut.local_shape(self.tp.size)[0] if input_is_parallel else in_features
        self._declare(cut, 1, ShardSpec((out_features,)) if bias else None, init_method, dtype, device)

    @property
    def tokens_dim(self) -> int | None:
        """The dim of the output along which tokens are spread in this call."""
        return self.sequence_dim if self.region is None or self.region.active else None

    def forward(self, x: Tensor) -> Result:
        weight, dim = self.weight.t() if self.transposed else self.weight, self.tokens_dim
        y = self._matmul(self._enter(x), weight, None if self.skip_bias_add else self.bias)
        if dim is not None:
            y = self.as_part(y, dim, "tokens")
        if not self.skip_bias_add:
            return y
        if self.bias is None or dim is None:
            return y, self.bias
        # the caller adds it to this rank's tokens only, so its gradient is summed over the ranks
        return y, ops.copy(self.bias, self.tp, dtype=self.reduce_dtype)

    def _enter(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self._takes:
            refuse_width(self, self.in_features, x, self._takes, self.input_is_parallel)
        check_tokens_dim(self, self.tokens_dim, x.ndim)
        return self.features.mask(x if self.input_is_parallel else self.features.scatter(x, self.tp), self.tp)

    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x, weight, bias, (self.tp, self.tokens_dim, self.reduce_dtype), self.weight_scale)


def _conv1d_sizes(plain: nn.Module, layer: type[nn.Module]) -> tuple[int, int]:
    # recognised by its attributes, for transformers is not a dependency
    outputs, weight = getattr(plain, "nf", None), getattr(plain, "weight", None)
    if not isinstance(outputs, int) or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"{layer.__name__}.from_plain takes transformers' Conv1D, which has a weight of two dims and nf, "
            f"not {type(plain).__name__}"
        )
    if weight.shape[1] != outputs:
        raise ValueError(
            f"{layer.__name__}.from_plain: a weight of {tuple(weight.shape)} is not [inputs, nf={outputs}]"
        )
    return weight.shape[0], outputs


CONV1D = WeightForm(_conv1d_sizes, partial(nn.init.normal_, std=0.02), lambda fan_in: nn.init.zeros_, transposed=True)


class ColumnParallelConv1D(ColumnParallelLinear):
    """``y_r = x @ w_r + b_r``: ``ColumnParallelLinear`` with a weight of ``[in_features, out_features]``, as GPT-2's
    ``Conv1D`` in transformers has it: initially normal with deviation 0.02, and zero. ``c_attn`` has ``blocks=3``."""

    form, plain_type = CONV1D, nn.Module


class RowParallelConv1D(RowParallelLinear):
    """``y = sum over ranks of x_r @ w_r, + b``: ``RowParallelLinear`` with such a weight and initial values."""

    form, plain_type = CONV1D, nn.Module
