"""Dimensions of the inputs that may change, declared as for torch.export or derived from examples."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import Dim

from ...backend.interface import DynamicDim
from ..inputs import Arguments, DynamicShape, Structure

Sizes = tuple[tuple[DynamicShape, ...], dict[str, DynamicDim], tuple[dict[str, int], ...]]
"""Shapes, dims and buckets, as ``Inputs`` has them."""


def declared(sizes: Any, arguments: Arguments, leaves: Sequence[Tensor]) -> Sizes:
    """Shapes and dims from ``dynamic_shapes``. It has for each argument, by name or in order, a dict from
    dimension to ``torch.export.Dim``, name or None; a sequence of these; or None. Otherwise ValueError."""
    by_leaf: list[Mapping[int, Any]] = [{} for _ in leaves]
    forms = dict(arguments.form["dict"])
    if sizes is not None and not isinstance(sizes, Mapping):
        if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) != len(forms):
            raise ValueError(f"dynamic_shapes must be a dict or have one entry for each of {list(forms)}")
        sizes = dict(zip(forms, sizes, strict=True))
    for name, dims_of in (sizes or {}).items():
        if name not in forms:
            raise ValueError(f"dynamic_shapes has {name!r}; the traced arguments are {list(forms)}")
        _walk(dims_of, forms[name], f"dynamic_shapes[{name!r}]", by_leaf)
    dims: dict[str, DynamicDim] = {}
    shapes: list[DynamicShape] = []
    for i, (t, name) in enumerate(zip(leaves, arguments.names, strict=True)):
        shape: list[int | str] = list(t.shape)
        for at, value in by_leaf[i].items():
            if not isinstance(at, int) or not -t.ndim <= at < t.ndim:
                raise ValueError(f"dynamic_shapes: no dim {at!r} in {name} of shape {list(t.shape)}")
            dim = _dim(value, f"{name} dim {at % t.ndim}")
            if dims.setdefault(dim.name, dim) != dim:
                raise ValueError(f"dynamic_shapes: {dim.name!r} has two ranges, {dim} and {dims[dim.name]}")
            if not dim.takes(t.shape[at]):
                raise ValueError(f"{name} has shape {list(t.shape)}: its dim {at} is outside of {dim}")
            shape[at] = dim.name
        shapes.append(tuple(shape))
    return tuple(shapes), dims, ()


def _walk(sizes: Any, form: Structure, where: str, by_leaf: list[Mapping[int, Any]]) -> None:
    ((kind, inner),) = form.items()
    if sizes is None:
        return
    if kind == "tensor":
        if not isinstance(sizes, Mapping | Sequence) or isinstance(sizes, str):
            raise ValueError(f"{where} must be a dict from dimension to Dim, or a list, not {sizes!r}")
        by_dim = sizes.items() if isinstance(sizes, Mapping) else enumerate(sizes)
        dynamic = {at: v for at, v in by_dim if not (v is None or isinstance(v, int) or v is Dim.STATIC)}
        by_leaf[inner] = dynamic
    elif kind in ("tuple", "list"):
        for i, (size, f) in enumerate(zip(sizes, inner, strict=True)):
            _walk(size, f, f"{where}[{i}]", by_leaf)
    elif kind != "value":
        for key, f in inner:
            _walk(sizes.get(key), f, f"{where}[{key!r}]", by_leaf)


def _dim(value: Any, place: str) -> DynamicDim:
    if isinstance(value, str):
        return DynamicDim(value)
    if not isinstance(value, Dim) or hasattr(value, "root"):  # only a derived Dim, such as 2 * dim, has root
        raise ValueError(f"dynamic_shapes: {value!r} for {place}; give a torch.export.Dim, or a name (of any size)")
    high = value.max if isinstance(value.max, int) and value.max < sys.maxsize else None
    # a size of 0 is useless, and torch.export represents "no maximum" by its own infinity
    return DynamicDim(value.__name__, max(1, int(value.min)), high)


def by_example(arguments: Arguments, examples: Sequence[Sequence[Tensor]]) -> Sizes:
    """Shapes, dims and buckets from examples, smallest first. Sizes that change together are one dim."""
    dims: dict[str, DynamicDim] = {}
    named: dict[tuple[int, ...], str] = {}
    shapes: list[DynamicShape] = []
    for i, leaves in enumerate(zip(*examples, strict=True)):
        name = arguments.names[i]
        if len({t.ndim for t in leaves}) > 1 or len({t.dtype for t in leaves}) > 1:
            forms = [f"{t.dtype} {list(t.shape)}" for t in leaves]
            raise ValueError(f"bucket_inputs: {name} differs in more than sizes: {forms}")
        shape: list[int | str] = list(leaves[0].shape)
        for at, sizes in enumerate(zip(*(t.shape for t in leaves), strict=True)):
            if len(set(sizes)) > 1:
                shape[at] = named.setdefault(sizes, f"{name} dim {at}")
                dims[named[sizes]] = DynamicDim(named[sizes], 1, max(sizes))
        shapes.append(tuple(shape))
    buckets = tuple({name: sizes[k] for sizes, name in named.items()} for k in range(len(examples)))
    return tuple(shapes), dims, buckets if dims else ()


def output_shapes(
    outputs: Sequence[Sequence[Sequence[int]]], buckets: Sequence[Mapping[str, int]]
) -> tuple[DynamicShape, ...]:
    """Shapes of the outputs, with names of the inputs' dims. ``outputs``: shapes from each bucket's program.
    ValueError if an output's size changes from bucket to bucket, but not together with an input's size."""
    output_shapes: list[DynamicShape] = []
    sizes_of = {name: tuple(bucket[name] for bucket in buckets) for name in (buckets[0] if buckets else ())}
    for i, shapes in enumerate(zip(*outputs, strict=True)):
        shape: list[int | str] = []
        for at, sizes in enumerate(zip(*shapes, strict=True)):
            names = [name for name, wanted in sizes_of.items() if wanted == sizes]
            if len(set(sizes)) > 1 and not names:
                raise ValueError(
                    f"output {i} has the sizes {list(sizes)} in dim {at}, which are those of no input: it "
                    "cannot be cut back after padding; use dynamic_shapes instead of bucket_inputs"
                )
            shape.append(names[0] if names else sizes[0])
        output_shapes.append(tuple(shape))
    return tuple(output_shapes)
