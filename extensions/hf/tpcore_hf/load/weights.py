"""The stored tensor that each tensor of a model is read from, by transformers' own mapping of names."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tpcore.checkpoint.forms.whole import in_memory
from tpcore.checkpoint.stored import Shard, Stored
from tpcore.errors import CheckpointError
from tpcore.layers.sharding import layouts
from tpcore.layout.shard import ShardSpec
from tpcore.layout.slices import narrowed

_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Weights:
    """Stored tensors by the model's names. Their files are open as long as it, or its ``source``, exists."""

    path: str
    tensors: Mapping[str, Any]
    source: Weights | None = None

    def __deepcopy__(self, memo: Any) -> Weights:
        return self

    def with_initial(self, model: Any) -> Weights:
        """These, and what no file has and the model has made: it is sharded as if a file had it."""
        initial = {n: t for n, t in model.state_dict().items() if n not in self.tensors}
        values = {n: t for n, t in initial.items() if isinstance(t, Tensor) and not t.is_meta}
        return Weights(self.path, {**self.tensors, **in_memory(values, self.path)}, self)


@dataclass(frozen=True, eq=False)
class Conversion:
    """Stored tensors that transformers merges, splits or unpacks into tensors of the model."""

    target: str
    converter: Any
    like: Mapping[str, Tensor]
    config: Any
    parts: list[tuple[str, str, Any]] = field(default_factory=list)

    def run(self) -> Mapping[str, Tensor]:
        """All that it makes, whole."""
        converter = copy.deepcopy(self.converter)
        for pattern, name, source in self.parts:
            # if not stored, a tensor of a GGUF file, which transformers reads when it is asked
            value = torch.empty(source.shape, dtype=source.dtype) if isinstance(source, Stored) else source[...]
            if isinstance(source, Stored):
                source.first.read((0,) * value.ndim, value, False)
            converter.add_tensor(self.target, name, pattern, value)
        model = SimpleNamespace(get_parameter=self.like.__getitem__, config=self.config)
        converted = converter.convert(self.target, model=model, config=self.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in converted.items()}

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """What the model has of it: read in parts, or made anew each time where an operation has no view."""
        first, *others = self.converter.target_patterns
        names = [self.target, *(self.target.replace(first, other) for other in others)]
        shapes = [tuple(self.like[name].shape) for name in names if name in self.like]
        stored = all(isinstance(item, Stored) for *_, item in self.parts)
        patterns = self.converter.source_patterns if stored else ()
        sources = [[item.first for p, _, item in self.parts if p == pattern] for pattern in patterns]
        shards = views(self.converter, sources, shapes) if stored and len(shapes) == len(names) else None
        for i, name in enumerate(names):
            if name in self.like:
                yield name, self._whole(name) if shards is None else shards[i]

    def _whole(self, name: str) -> View:
        shape = tuple(self.like[name].shape)

        def fill(starts: Sequence[int], out: Tensor, check: bool) -> None:
            value = self.run()[name]
            if tuple(value.shape) != shape:
                raise CheckpointError(f"{name!r}: the files have shape {tuple(value.shape)}, the model {shape}")
            out.copy_(narrowed(value, starts, out.shape))

        return View((), shape, self.like[name].dtype, fill)


def by_model_name(model: Any, stored: Mapping[str, Any], mapping: Sequence[Any]) -> dict[str, Any]:
    """``stored`` by the model's names. Names that the model lacks stay. ``mapping``: transformers' own."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    # in the shapes that they have in a model that is not sharded
    like = {n: torch.empty(layout.shape, dtype=state[n].dtype, device="meta") for n, layout in layouts(model).items()}
    tensors: dict[str, Any] = {}
    conversions: dict[str, Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, like)
        if target not in like and name in like:
            target, pattern = rename_source_key(name, [], [], prefix, like)
        if pattern is None or target not in like:
            tensors.setdefault(target, stored[name])
            continue
        new = Conversion(target, of_pattern[pattern], like, model.config)
        conversions.setdefault(target, new).parts.append((pattern, name, stored[name]))
    for conversion in conversions.values():
        for name, shard in conversion.shards():
            tensors[name] = Stored.over_tp(name, ShardSpec(shard.shape), 1, None, lambda _, s=shard: s)  # type: ignore[misc]
    return tensors


def equal(a: Stored, b: Stored) -> bool:
    """Whether two stored tensors have the same values. Compares some rows at a time."""
    if a.shape != b.shape or a.dtype != b.dtype or a.first.identity == b.first.identity:
        return a.shape == b.shape and a.dtype == b.dtype
    for start in range(0, a.shape[0], _ROWS):
        size = (min(_ROWS, a.shape[0] - start), *a.shape[1:])
        x, y = (torch.empty(size, dtype=a.dtype) for _ in range(2))
        for stored, out in ((a, x), (b, y)):
            stored.first.read((start, *(0 for _ in size[1:])), out, False)
        if not torch.equal(x, y):
            return False
    return True


@dataclass(frozen=True, eq=False)
class View:
    """A shard made of others. A part of it is read from their parts, so that a rank has no more in memory than it
    keeps."""

    parts: Sequence[Shard]
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Sequence[int], Tensor, bool], None]

    @property
    def identity(self) -> object:
        return id(self)

    def verify(self) -> None:
        for part in self.parts:
            part.verify()

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        self.fill(starts, out, check)


def _stacked(parts: Sequence[Shard]) -> View | None:
    """Along a new first dim; None for parts of several shapes."""

    def fill(starts: Sequence[int], out: Tensor, check: bool) -> None:
        for number, part in enumerate(parts[starts[0] : starts[0] + len(out)]):
            part.read(starts[1:], out[number], check)

    alike = len({part.shape for part in parts}) == 1
    return View(parts, (len(parts), *parts[0].shape), parts[0].dtype, fill) if alike else None


def _joined(parts: Sequence[Shard], dim: int) -> View | None:
    """One after the other along ``dim``; None for parts that differ in other dims."""

    def fill(starts: Sequence[int], out: Tensor, check: bool) -> None:
        begin, at = starts[dim], 0
        for part in parts:
            low, high = max(at, begin), min(at + part.shape[dim], begin + out.shape[dim])
            if low < high:
                part.read(_moved(starts, dim, low - at), out.narrow(dim, low - begin, high - low), check)
            at += part.shape[dim]

    alike = len({_moved(part.shape, dim, 0) for part in parts}) == 1
    shape = _moved(parts[0].shape, dim, sum(part.shape[dim] for part in parts))
    return View(parts, shape, parts[0].dtype, fill) if alike else None


def _divided(part: Shard, dim: int, first: int, size: int) -> View:
    def fill(starts: Sequence[int], out: Tensor, check: bool) -> None:
        part.read(_moved(starts, dim, starts[dim] + first), out, check)

    return View([part], _moved(part.shape, dim, size), part.dtype, fill)


def _transposed(part: Shard, dim0: int, dim1: int) -> View:
    def there(places: Sequence[int]) -> tuple[int, ...]:
        return _moved(_moved(places, dim0, places[dim1]), dim1, places[dim0])

    def fill(starts: Sequence[int], out: Tensor, check: bool) -> None:
        part.read(there(starts), out.transpose(dim0, dim1), check)

    return View([part], there(part.shape), part.dtype, fill)


def _deinterleaved(part: Shard, dim: int) -> View:
    """The even entries of ``dim``, then the odd ones. What lies between those that are wanted is read too, for one
    entry of the dims before at a time."""

    def fill(starts: Sequence[int], out: Tensor, check: bool) -> None:
        if dim and len(out) > 1:
            for number in range(len(out)):
                fill(_moved(starts, 0, starts[0] + number), out[number : number + 1], check)
            return
        begin, half = starts[dim], part.shape[dim] // 2
        for odd in (0, 1):
            low, high = max(odd * half, begin), min((odd + 1) * half, begin + out.shape[dim])
            if low < high:
                into = out.narrow(dim, low - begin, high - low)
                span = torch.empty(_moved(into.shape, dim, 2 * (high - low) - 1), dtype=part.dtype)
                part.read(_moved(starts, dim, 2 * (low - odd * half) + odd), span, False)
                into.copy_(span[(slice(None),) * dim + (slice(None, None, 2),)])

    return View([part], part.shape, part.dtype, fill)


def _moved(starts: Sequence[int], dim: int, to: int) -> tuple[int, ...]:
    return (*starts[:dim], to, *starts[dim + 1 :])


def views(converter: Any, sources: Sequence[Sequence[Shard]], shapes: Sequence[tuple[int, ...]]) -> list[Shard] | None:
    """What transformers' ``converter`` makes of ``sources``, by its source patterns, as tensors of ``shapes``, by its
    targets. None if one of its operations has no view, or the tensors do not fit."""
    groups = [list(group) for group in sources]
    for op in converter.operations:
        if not groups or not all(groups) or len({(len(s.shape), s.dtype) for group in groups for s in group}) != 1:
            return None
        groups = [[] if view is None else [view] for view in _by(op, groups, shapes)]
    fits = [[shard.shape for shard in group] for group in groups] == [[tuple(shape)] for shape in shapes]
    return [group[0] for group in groups] if fits else None


def _by(op: Any, groups: list[list[Shard]], shapes: Sequence[tuple[int, ...]]) -> Sequence[Shard | None]:
    """What one operation makes; None for what has no view."""
    kind, dim, (first, *others) = type(op).__name__, getattr(op, "dim", 0), groups[0]
    if kind == "MergeModulelist" and dim == 0:
        return [_stacked(group) for group in groups]
    if kind == "Concatenate":
        return [_joined([shard for group in groups for shard in group], dim)]
    if kind == "ErnieFuseAndSplitTextVisionExperts" and (op.stack_dim, op.concat_dim) == (0, 1):
        size = math.ceil(len(groups[0]) / len(shapes))
        rows = [[_stacked(g[at : at + size]) for g in groups] for at in range(0, len(groups[0]), size)]
        return [None if None in row else _joined([s for s in row if s is not None], 1) for row in rows]
    if others or len(groups) > 1:
        return [None]
    sizes = [shape[dim] for shape in shapes if len(shape) > dim]
    if kind in ("Chunk", "Split") and sum(sizes) == first.shape[dim]:
        uneven = kind == "Chunk" and (op.num_shards_attribute is not None or len(set(sizes)) > 1)
        return [None if uneven else _divided(first, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    if kind == "Transpose":
        return [first if op.check_dims and first.shape == tuple(shapes[0]) else _transposed(first, op.dim0, op.dim1)]
    if kind == "Interleave" and not op.inverse and first.shape[dim] % 2 == 0:
        return [_deinterleaved(first, dim)]
    return [None]
