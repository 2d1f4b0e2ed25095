"""The layers of one stage as one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...runtime import random
from .arguments import LayerArguments

Kept = dict[str, tuple[Tensor, int]]


class StageLayers:
    """Runs ``layers`` one after another. The stage's ``place`` affects only its random numbers.

    ``layers``: the children of a module by name. The module itself refers to this object, and a cycle would
    keep the memory of a dropped model until the garbage collector runs, on each rank at another time.
    """

    def __init__(self, layers: Mapping[str, nn.Module | None], place: int) -> None:
        self._layers, self.place = layers, place
        self.tuples = False  # whether layers return their output in a tuple, as some models' layers do

    def __call__(self, x: Tensor, arguments: LayerArguments) -> Tensor:
        for _, layer in self._named():
            x = self._hidden(layer(x, *arguments.positional, **arguments.named))
        return x

    def run(
        self, arguments: Callable[[], LayerArguments], seed: int | None, microbatch: int, *, check: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """A function that runs the stage on one microbatch; every call draws the same random numbers. With ``check``
        it raises ValueError on all ranks for layers that a pipeline cannot run."""

        def call(x: Tensor) -> Tensor:
            before = self._kept() if check else {}
            if seed is None:
                y = self(x, arguments())
            else:
                with random.seeded(random.mixed(seed, microbatch, self.place + 1)):
                    y = self(x, arguments())
            if check:
                self._check(x, y, before)
            return y

        return call

    def _check(self, x: Tensor, y: Tensor, before: Kept) -> None:
        for name, (t, version) in self._kept().items():
            if name not in before or before[name][0] is not t or before[name][1] != version:
                raise ValueError(
                    f"the layers change {name!r} as they run: in a pipeline they also run on what is no "
                    "microbatch, and again in backward; replace what keeps statistics, such as a BatchNorm, "
                    "or a loss of its own"
                )
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(
                f"the layers make {y.dtype} {tuple(y.shape)} of {x.dtype} {tuple(x.shape)}: what goes from "
                "stage to stage has one shape and dtype"
            )

    def _kept(self) -> Kept:
        """Buffers and one-element tensors among the layers' attributes, each with its version. Larger
        attributes are left out: they may be caches, of a mask say, that are equal for each microbatch."""
        found: Kept = {}
        for number, layer in self._named():
            found |= {name: (buffer, buffer._version) for name, buffer in layer.named_buffers(number)}
            for path, module in layer.named_modules(prefix=number):
                for key, t in vars(module).items():
                    if isinstance(t, Tensor) and t.numel() == 1:
                        found[f"{path}.{key}"] = t, t._version
        return found

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
