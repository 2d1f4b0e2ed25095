"""The layers of one stage as one function, and their nested arguments, whose tensors are cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import nested
from ...comm.comm import Comm
from ...runtime import random

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.memory_format, torch.Size),
)


@dataclass(frozen=True)
class LayerArguments:
    """Positional arguments, with their ``names``, and keyword arguments."""

    names: tuple[str, ...]
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    def mapped(self, fn: Callable[[Tensor, str], Any]) -> LayerArguments:
        """Replace each tensor by ``fn(tensor, name of its argument)``. ValueError for an object that may
        contain tensors."""
        positional = tuple(_mapped(v, fn, n) for v, n in zip(self.positional, self.names, strict=False))
        return LayerArguments(self.names, positional, {n: _mapped(v, fn, n) for n, v in self.named.items()})

    def tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = []
        self.mapped(lambda t, name: tensors.append(t))
        return tensors

    def requiring_grad(self) -> list[str]:
        """Names of the arguments with tensors that require a gradient."""
        names: dict[str, None] = {}
        self.mapped(lambda t, name: names.setdefault(name) if t.requires_grad else None)
        return list(names)

    def microbatch(self, index: Tensor, count: int, batch: int, shared: Collection[str] | None) -> LayerArguments:
        """The arguments of microbatch ``index`` of ``count``: its part of tensors whose dim 0 is the batch.
        The index is a tensor, because it differs by stage."""

        def part(t: Tensor, name: str) -> Tensor:
            if count == 1 or not t.ndim or t.shape[0] != batch or name in (shared or ()):
                return t
            chunks: Tensor = t.unflatten(0, (count, -1))
            return chunks.index_select(0, index).squeeze(0)

        return self.mapped(part)


def check_told_apart(arguments: LayerArguments, x: Tensor) -> None:
    """Raise ValueError if dim 0 of an argument may be either the batch of ``x`` or another dim of it."""

    def check(t: Tensor, name: str) -> None:
        if t.ndim and t.shape[0] == len(x) and len(x) in x.shape[1:]:
            raise ValueError(
                f"the layers get {name} of shape {tuple(t.shape)} beside an input of {tuple(x.shape)}: its "
                "size does not tell whether it is cut into microbatches. Pass "
                f"shared=[{name!r}] if every microbatch gets all of it, and shared=[] if not"
            )

    arguments.mapped(check)


def chosen(by_stage: Sequence[LayerArguments], pp: Comm, place: int) -> LayerArguments:
    """This stage's arguments out of those of every stage, selected by data. Where their forms differ, as
    transformers leaves out a mask that masks nothing, data cannot: an eager backend takes the arguments at ``place``;
    a lazy one would need several programs: ValueError."""
    first = by_stage[0]
    plain = [a.mapped(lambda t, name: ...) for a in by_stage]
    if any(other != plain[0] for other in plain):
        if pp.eager:
            return by_stage[place]
        raise ValueError(
            "the model calls its layers with other arguments from microbatch to microbatch, beside tensors: "
            f"{next(other for other in plain if other != plain[0])} and {plain[0]}; all stages run one program"
        )
    columns = iter(list(zip(*(a.tensors() for a in by_stage), strict=True)))

    def choose(t: Tensor, name: str) -> Tensor:
        column = next(columns)
        if all(other is t for other in column):
            return t
        return torch.stack(column).index_select(0, pp.position).squeeze(0)

    return first.mapped(choose)


def _mapped(value: Any, fn: Callable[[Tensor, str], Any], name: str) -> Any:
    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return fn(value, name)
        if isinstance(value, _PLAIN):
            return value
        raise ValueError(
            f"the layers of a pipeline get {name}, a {type(value).__name__}: what it holds cannot go with its "
            "microbatch. Pass tensors, numbers, strings, and tuples, lists and dicts of these; a transformers "
            "model makes no cache with use_cache=False"
        )

    return nested.mapped(leaf, value, object)


def check_count(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"num_microbatches must be a whole number, 1 or more, not {number!r}")
    return number


def check_divides(batch: int, count: int) -> int:
    """``count``. ValueError if it does not divide the batch."""
    if not batch or batch % count:
        fit = ", ".join(str(n) for n in range(1, batch + 1) if not batch % n)
        raise ValueError(
            f"a batch of {batch} does not divide into num_microbatches={count}: "
            + (f"{fit} would do" if batch else "it is empty")
        )
    return count


def microbatches(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, shared: Collection[str], *, copied: bool
) -> list[LayerArguments]:
    """Each microbatch's arguments: its part of every tensor whose dim 0 has the size of the first tensor's.
    ``copied``: in memory of its own, so that one program serves all microbatches."""
    names = tuple(f"argument {i}" for i in range(len(args)))
    whole = LayerArguments(names, args, kwargs)
    batch = next((len(t) for t in whole.tensors() if t.ndim), 0)
    check_divides(batch, count)

    def part(t: Tensor, name: str, i: int) -> Tensor:
        if not t.ndim or len(t) != batch or name in shared:
            return t
        chunk = t.chunk(count)[i]
        return chunk.clone() if copied else chunk

    return [whole.mapped(lambda t, name, i=i: part(t, name, i)) for i in range(count)]  # type: ignore[misc]


Versioned = dict[str, tuple[Tensor, int]]


class StageLayers:
    """Runs ``layers`` one after another. The stage's ``place`` affects only its random numbers.

    ``layers``: the children of a module by name. The module itself refers to this object, and a cycle would
    keep the memory of a dropped model until the garbage collector runs, on each rank at another time.
    """

    def __init__(self, layers: Mapping[str, nn.Module | None], place: int) -> None:
        self._layers, self.place = layers, place
        self.counts: Callable[[], Tensor] | None = None
        """While the stage runs: ``[1]``, 1 for a microbatch and 0 in the bubble, for who sums over microbatches."""
        self.tuples = False  # whether layers return their output in a tuple, as some models' layers do

    def __call__(self, x: Tensor, arguments: LayerArguments) -> Tensor:
        for _, layer in self._named():
            x = self._hidden(layer(x, *arguments.positional, **arguments.named))
        return x

    def run(
        self,
        arguments: Callable[[], LayerArguments],
        seed: int | None,
        microbatch: int,
        counts: Callable[[], Tensor],
        *,
        check: bool = False,
    ) -> Callable[[Tensor], Tensor]:
        """A function that runs the stage on one microbatch; every call draws the same random numbers. With ``check``
        it raises ValueError on all ranks for layers that a pipeline cannot run."""

        def call(x: Tensor) -> Tensor:
            before = self._versioned() if check else {}
            self.counts = counts
            try:
                with nullcontext() if seed is None else random.seeded(random.mixed(seed, microbatch, self.place + 1)):
                    y = self(x, arguments())
            finally:
                self.counts = None
            if check:
                self._check(x, y, before)
            return y

        return call

    def _check(self, x: Tensor, y: Tensor, before: Versioned) -> None:
        for name, (t, version) in self._versioned().items():
            if name not in before or before[name][0] is not t or before[name][1] != version:
                raise ValueError(
                    f"the layers change {name!r} as they run: in a pipeline they also run on what is no microbatch, "
                    "and again in backward; replace what keeps statistics, such as a BatchNorm, or a loss of its own"
                )
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(
                f"the layers make {y.dtype} {tuple(y.shape)} of {x.dtype} {tuple(x.shape)}: what goes from "
                "stage to stage has one shape and dtype"
            )

    def _versioned(self) -> Versioned:
        """Buffers and one-element tensors among the layers' attributes, each with its version. Larger
        attributes are left out: they may be caches, of a mask say, that are equal for each microbatch."""
        versions: Versioned = {}
        for number, layer in self._named():
            versions |= {name: (buffer, buffer._version) for name, buffer in layer.named_buffers(number)}
            for path, module in layer.named_modules(prefix=number):
                for key, t in vars(module).items():
                    if isinstance(t, Tensor) and t.numel() == 1:
                        versions[f"{path}.{key}"] = t, t._version
        return versions

    def _named(self) -> list[tuple[str, nn.Module]]:
        return [(number, layer) for number, layer in self._layers.items() if layer is not None]

    def _hidden(self, out: Any) -> Tensor:
        self.tuples = isinstance(out, tuple | list)
        if isinstance(out, Tensor):
            return out
        if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            if all(other is None for other in out[1:]):
                return out[0]
            raise ValueError(
                f"a layer returned {len(out)} values, and one goes from stage to stage: a loss or attention "
                "weights of its own would be lost; switch off what returns them"
            )
        raise ValueError(f"a layer returned a {type(out).__name__}, not a tensor")
