"""The stored tensor that each tensor of a model is read from, by transformers' own mapping of names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.forms.whole import in_memory
from ..checkpoint.stored import Shard, Stored
from ..errors import CheckpointError
from ..layers.sharding import sharding
from ..layout.shard import ShardSpec
from ..layout.slices import narrowed
from .views import views

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
        """These, and what no file has and the model has made: it is cut as if a file had it."""
        made = {n: t for n, t in model.state_dict().items() if n not in self.tensors}
        values = {n: t for n, t in made.items() if isinstance(t, Tensor) and not t.is_meta}
        return Weights(self.path, {**self.tensors, **in_memory(values, self.path)}, self)


@dataclass(frozen=True, eq=False)
class Conversion:
    """Stored tensors that transformers merges, splits or unpacks into tensors of the model."""

    target: str
    converter: Any
    like: Mapping[str, Tensor]
    config: Any
    parts: list[tuple[str, str, Any]] = field(default_factory=list)

    def targets(self) -> Iterable[str]:
        first, *others = self.converter.target_patterns
        return (self.target, *(self.target.replace(first, other) for other in others))

    def run(self) -> Mapping[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, name, item in self.parts:
            converter.add_tensor(self.target, name, pattern, _value(item))
        model = SimpleNamespace(get_parameter=self.like.__getitem__, config=self.config)
        made = converter.convert(self.target, model=model, config=self.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def _value(item: Any) -> Tensor:
    if not isinstance(item, Stored):
        value: Tensor = item[...]  # a tensor of a GGUF file, which transformers reads when it is asked
        return value
    out = torch.empty(item.shape, dtype=item.dtype)
    item.first.read((0,) * out.ndim, out, False)
    return out


@dataclass(frozen=True, eq=False)
class Converted:
    """A shard that is made whole, with all that its conversion makes, each time a part of it is read."""

    conversion: Conversion
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def identity(self) -> object:
        return id(self.conversion), self.name

    def verify(self) -> None:
        pass

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        value = self.conversion.run()[self.name]
        if tuple(value.shape) != self.shape:
            raise CheckpointError(f"{self.name!r}: the files have shape {tuple(value.shape)}, the model {self.shape}")
        out.copy_(narrowed(value, starts, out.shape))


def _viewed(conversion: Conversion, shapes: Sequence[tuple[int, ...]]) -> Sequence[Shard] | None:
    """Its tensors of ``shapes``, read in parts; None if they can only be made whole."""
    items = [item for *_, item in conversion.parts]
    sources = [
        [item.first for pattern, _, item in conversion.parts if pattern == one and isinstance(item, Stored)]
        for one in conversion.converter.source_patterns
    ]
    return views(conversion.converter, sources, shapes) if all(isinstance(i, Stored) for i in items) else None


def by_model_name(model: Any, stored: Mapping[str, Any], mapping: Sequence[Any]) -> dict[str, Any]:
    """``stored`` by the model's names. Names that the model lacks stay. ``mapping``: transformers' own."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    like, prefix = _whole(model), model.base_model_prefix
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
        names = list(conversion.targets())
        shapes = [tuple(like[name].shape) for name in names if name in like]
        found = _viewed(conversion, shapes) if len(shapes) == len(names) else None
        for i, name in enumerate(names):
            if name in like:
                t = like[name]
                shard = Converted(conversion, name, tuple(t.shape), t.dtype) if found is None else found[i]
                tensors[name] = Stored.over_tp(name, ShardSpec(shard.shape), 1, None, lambda _, s=shard: s)  # type: ignore[misc]
    return tensors


def _whole(model: Any) -> dict[str, Tensor]:
    """The model's tensors on meta, in the shapes that they have in a model that is not cut."""
    tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    marks = {name: sharding(t) for name, t in tensors.items()}
    shapes = {name: t.shape if (mark := marks[name]) is None else mark.layout.shape for name, t in tensors.items()}
    return {name: torch.empty(shapes[name], dtype=t.dtype, device="meta") for name, t in tensors.items()}


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
