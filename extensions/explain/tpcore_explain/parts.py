"""A part of an activation, in runs with checks: each operation that takes it for the whole is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpcore import nested
from tpcore.comm.observer import Observed
from tpcore.private import OpOverload, plain_functions


def _words(*texts: str) -> frozenset[str]:
    return frozenset(word for text in texts for word in text.split())


_CONTRACTIONS = _words(
    "linear matmul rmatmul mm bmm mv dot addmm baddbmm einsum tensordot sum mean scaled_dot_product_attention",
    # the ring's
    "scaled_dot_product_flash_attention_for_cpu scaled_dot_product_flash_attention_for_cpu_backward",
)
_OF_HEADS = _words("matmul rmatmul bmm scaled_dot_product_attention")
"""Those that do the same in each entry of the dims before the last two."""
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_REARRANGEMENTS = _words(
    "view reshape flatten unflatten transpose swapaxes swapdims permute movedim moveaxis t squeeze unsqueeze expand"
)
_SPLITTING = frozenset(("view", "reshape", "unflatten"))
_OVER_LAST = frozenset(("layer_norm", "rms_norm"))
_OVER_DIM: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        _words(
            "softmax log_softmax softmin logsumexp argmax argmin max min amax amin var std var_mean std_mean prod "
            "nansum nanmean median nanmedian any all count_nonzero cumsum cumprod cummax cummin logcumsumexp flip"
        ),
        (1, None),
    ),
    **dict.fromkeys(("sort", "argsort", "glu", "mode"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue", "diff"), (2, -1)),
    **dict.fromkeys(("norm", "linalg_vector_norm", "roll"), (2, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "gumbel_softmax": (4, -1),
}
"""Operations over one dim: the position of the argument ``dim``, and its default; None: all dims."""
_OVER_CLASSES = frozenset(("cross_entropy", "nll_loss"))
_BY_PLACE: dict[str, int] = {
    **dict.fromkeys(_words("chunk tensor_split split split_with_sizes unsafe_chunk unsafe_split take_along_dim"), 2),
    **dict.fromkeys(
        _words(
            "select narrow index_select gather unbind index_fill index_add index_copy scatter scatter_add cat concat "
            "concatenate"
        ),
        1,
    ),
}
"""Operations that take entries of one dim by their places, or put others beside them: the position of ``dim``."""
_AT_DIM = {"vsplit": 0, "vstack": 0, "row_stack": 0, "flipud": 0, "hsplit": 1, "hstack": 1, "column_stack": 1}
_AT_DIM |= {"fliplr": 1, "dsplit": 2, "dstack": 2}
"""As ``_BY_PLACE``, of a dim that the name says."""
_OF_ALL = _words("take put masked_select diagonal")
"""As ``_BY_PLACE``, of any dims; what is selected by values is then of no known place."""
_BY_ENTRY = _words(
    # entry by entry
    "abs absolute acos acosh add addcdiv addcmul alpha_dropout and angle arccos arccosh arcsin arcsinh arctan arctan2 "
    "arctanh asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp "
    "clamp_max clamp_min clip conj conj_physical copysign cos cosh deg2rad digamma div divide dropout dropout1d "
    "dropout2d dropout3d elu eq erf erfc erfinv exp exp2 expm1 feature_alpha_dropout fix float_power floor "
    "floor_divide floordiv fmax fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish "
    "hardtanh heaviside hypot iadd iand ifloordiv imod imul invert ior ipow isclose isfinite isinf isnan isneginf "
    "isposinf isreal isub itruediv ixor ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp "
    "logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish "
    "mod mul multiply nan_to_num ne neg negative nextafter not_equal or pos positive pow prelu rad2deg radd rand rdiv "
    "reciprocal relu relu6 remainder rfloordiv rmod rmul ror round rpow rrelu rsqrt rsub rtruediv rxor selu sgn "
    "sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink "
    "threshold true_divide truediv trunc where xlogy xor",
    # copies, and values that are filled in
    "bfloat16 bool clone contiguous copy cpu cuda deepcopy detach double empty_like fill float full_like "
    "half int long new_empty new_full new_ones new_tensor new_zeros normal ones_like rand_like randn_like "
    "short tensor to type type_as uniform zero zeros_like",
    # choices of entries
    "broadcast_tensors broadcast_to cat chunk concat concatenate diagonal expand_as gather getitem "
    "index_add index_copy index_fill index_put index_select iter masked_scatter masked_select narrow pad "
    "ravel repeat repeat_interleave reshape_as resolve_conj resolve_neg scatter scatter_add select setitem "
    "split split_with_sizes stack take_along_dim tensor_split tile tril triu unbind unsafe_chunk "
    "unsafe_split view_as view_as_complex view_as_real",
    # what is asked of the tensor itself, and autograd
    "allclose array backward data_ptr delete dim element_size equal format get get_device grad hash "
    "is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_nonzero is_pinned "
    "is_same_size is_set_to is_shared item len ndimension nelement numel numpy pin_memory record_stream "
    "reduce_ex register_hook register_post_accumulate_grad_hook repr requires_grad result_type retain_grad "
    "set share_memory size storage_offset stride tolist untyped_storage",
)
"""Operations whose result for a part is the part of the result, or that use no values. Names without the
underscores of operators and of operations in place."""


def understood(name: str) -> bool:
    """Whether a checked run can tell what the function ``name`` makes of a part."""
    tables = (_BY_ENTRY, _CONTRACTIONS, _CONVOLUTIONS, _REARRANGEMENTS, _OVER_LAST, _OVER_DIM, _OVER_CLASSES)
    return any(name.strip("_") in names for names in tables)


@dataclass(frozen=True)
class Mark:
    """The ``width`` entries along ``dim`` are this rank's part of the features or of the tokens."""

    kind: str
    dim: int
    width: int
    ranks: int
    report: Callable[[str], None]
    certain: bool = False
    """Whether operations that are not understood pass, and a forward has the order of the whole features."""


class PartOf(Observed):
    """This rank's part of an activation, in a run with checks: every operation on it is inspected. The result of an
    operation is a part too, if the sharded dim can be found in the result: exactly for views and operations that keep
    the shape, for others if one dim alone has its size."""

    mark: Mark

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(nested.tensors((args, kwargs)))
        mark = next(t.mark for t in tensors if isinstance(t, PartOf))
        name = getattr(func, "__name__", "").strip("_")
        # what an operation is made of is no operation of the program: on meta tensors it comes here by itself
        inner = isinstance(func, OpOverload) and func.namespace in ("aten", "prims")
        if not inner and (problem := _problem(name, mark, tensors, args, kwargs)):
            mark.report(problem)
        with plain_functions():
            out = func(*args, **kwargs)
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            shape = next(t.shape for t in tensors if isinstance(t, PartOf))
            apart = mark.certain and name in _OF_HEADS and mark.dim < len(shape) - 2
            if (name in _CONTRACTIONS and not apart) or (name in _CONVOLUTIONS and groups == 1):
                return out
            if name in _REARRANGEMENTS and args and isinstance(args[0], PartOf):
                return _rearranged(out, args[0], name, lambda x: func(x, *args[1:], **kwargs))
            return _propagated(out, mark, shape)


def _rearranged(out: Tensor, x: PartOf, name: str, rearrange: Callable[[Tensor], Tensor]) -> Tensor:
    """``out``, marked where ``rearrange`` puts the sharded dim of ``x``: it follows from the strides of a view."""
    mark = x.mark
    if mark.width == 1:  # any dim of one entry has any stride
        return _propagated(out, mark, x.shape)  # type: ignore[no-any-return]
    meta = rearrange(torch.empty(x.shape, device="meta"))
    # the dim whose steps lead from this rank's part to the next rank's
    edge = math.prod(x.shape[mark.dim :])
    sizes = enumerate(zip(meta.shape, meta.stride(), strict=True))
    dim = next((i for i, (n, step) in sizes if n > 1 and step < edge <= step * n), None)
    if dim is None:
        return out
    split = name in _SPLITTING and out.ndim > x.ndim and dim > 0
    if split and dim > mark.dim and out.shape[dim - 1] == 1:
        return out  # view(..., 1, head_dim): heads are sharded, of which each rank has one, and the rest is whole
    return marked(out, replace(mark, dim=dim, width=out.shape[dim]))


def _propagated(out: Any, mark: Mark, shape: Sequence[int]) -> Any:
    """``out`` with the mark of an operand of this ``shape``, if the sharded dim can be found in it."""
    if type(out) in (list, tuple) or type(out).__module__ == "torch.return_types":
        return type(out)([_propagated(element, mark, shape) for element in out])
    if not isinstance(out, Tensor) or isinstance(out, PartOf) or not out.is_floating_point():
        return out
    places = [dim for dim, size in enumerate(out.shape) if size == mark.width]
    dim = mark.dim + max(0, out.ndim - len(shape))  # broadcasting adds dims in front
    if dim not in places and len(places) != 1:
        return out
    return marked(out, replace(mark, dim=dim if dim in places else places[0]))


def marked(t: Tensor, mark: Mark) -> Tensor:
    if type(t) is not Tensor and nested.is_plain(t):
        return t  # of a device that is written in Python, whose tensors take no other class
    part = t.as_subclass(PartOf)
    part.mark = mark
    return part


def _problem(name: str, mark: Mark, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What is wrong with a call of the function ``name`` on a part; None if nothing is."""
    part = f"{mark.width} of {mark.width * mark.ranks} {mark.kind}"
    if not (mark.certain or understood(name)):
        return (
            f"{name or 'an operation without a name'} sees only {part}, and a checked run does not know what "
            "it makes of a part: gather them first (gather_output=True, or tpcore.comm.mappings.gather), or, "
            "where the result is right, pass it x.as_subclass(torch.Tensor)"
        )
    if mark.kind == "tokens":
        params = [t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad]
        if params and torch.is_grad_enabled() and not getattr(params[0], "sequence_parallel_enabled", False):
            return (
                f"{name} with a parameter of shape {tuple(params[0].shape)} sees {part}, and so would its gradient: in "
                "a sequence-parallel region use tpcore.RMSNorm or tpcore.LayerNorm with sequence_parallel=True, or "
                "tpcore.comm.mappings.copy(parameter, comm) in a layer of your own"
            )
    if mark.certain and mark.kind == "features" and mark.dim in _by_place(name, args, kwargs):
        return (
            f"{name} takes or adds features by their places, and sees only {part}: where they are several projections' "
            "in one, give the layer their blocks ('packed_colwise', 'qkv_colwise' or a list of tpcore.Block in a plan, "
            "blocks= of a layer), else gather them first ('colwise_gather_output', gather_output=True)"
        )
    if mark.dim not in _reduced(name, args, kwargs, mark.certain):
        return None
    remedy = (
        "use tpcore.parallel_cross_entropy"
        if name in _OVER_CLASSES or name == "log_softmax"
        else "gather them first (gather_output=True, or tpcore.comm.mappings.gather)"
    )
    return f"{name} sees only {part}, different ones on each rank: {remedy}"


def _reduced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], sums: bool) -> range | tuple[int, ...]:
    """The dims that the function ``name`` reduces or normalizes over. ``sums``: a sum is none that ranks add up."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor):
        return ()
    if name in _OVER_CLASSES:
        return (min(1, x.ndim - 1),)
    if name in _OVER_LAST:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return range(x.ndim - len(shape), x.ndim)
    if name in _CONVOLUTIONS:
        return range(x.ndim - _CONVOLUTIONS[name], x.ndim)  # windows; channels are contracted or kept
    if name in ("tril", "triu"):
        return range(x.ndim - 2, x.ndim)
    if name == "pad":
        widths = list(args[1] if len(args) > 1 else kwargs["pad"])
        return tuple(x.ndim - 1 - i // 2 for i, width in enumerate(widths) if width)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return ()
    if name in _OVER_DIM or (sums and name in ("sum", "mean")):
        position, default = _OVER_DIM.get(name, (1, None))
        dim = kwargs.get("dim", kwargs.get("dims", args[position] if len(args) > position else default))
        if name == "flip" and len(args) > 2:
            dim = args[1:]
        dims = [dim] if isinstance(dim, int) and not isinstance(dim, bool) else dim
        return tuple(d % x.ndim for d in dims) if isinstance(dims, (list, tuple)) else range(x.ndim)
    return ()


def _by_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """The dims along which the function ``name`` takes entries by their places, or puts others beside them."""
    x = next((t for t in nested.tensors((args[:1], kwargs)) if isinstance(t, PartOf)), None)
    if x is None:
        return
    if name in ("getitem", "setitem"):
        yield from _indexed(args[1], x)
    elif name in ("repeat", "tile"):
        given = args[1:] or [value for value in kwargs.values() if not isinstance(value, Tensor)]
        sizes = given if isinstance(given[0], int) else given[0]
        yield from (x.ndim - 1 - i for i, times in enumerate(reversed(sizes)) if times != 1)
    elif name in _AT_DIM:
        yield min(_AT_DIM[name], x.ndim - 1)
    elif name in _OF_ALL or name in _BY_PLACE:
        position = _BY_PLACE.get(name, 0)
        dim = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else 0))
        yield from (dim % x.ndim,) if name in _BY_PLACE and dim is not None else range(x.ndim)


def _indexed(index: Any, x: Tensor) -> Iterator[int]:
    """The dims of which an index takes some places. Every second entry, and entries by their values, are taken of each
    part alike."""
    items = index if isinstance(index, tuple) else (index,)
    dims = [i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else int(i is not None) for i in items]
    dim = 0
    for item, count in zip(items, dims, strict=True):
        if item is Ellipsis:
            dim += x.ndim - sum(dims) + 1
            continue
        size = x.shape[dim] if dim < x.ndim else 0
        start, stop, step = item.indices(size) if isinstance(item, slice) else (1, 1, 1)
        in_each = start < step and len(range(start, stop, step)) * step == size
        if count and not in_each and not (isinstance(item, Tensor) and item.dtype == torch.bool):
            yield dim
        dim += count
