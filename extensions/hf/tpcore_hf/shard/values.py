"""Made-up outputs of the layers that are to be sharded, by which a forward on a rank is compared with the whole one."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tpcore import nested
from tpcore.layers.module import ParallelModule

from ..plan.decisions import CLOSES, OPENS, Cut
from ..plan.inputs import takes

_SMALL = 1 << 20
_TOLERANCE = 1e-5
"""Of what forwards compute in float32; everything else is in float64."""


class OtherValues(ValueError):
    """A layer reads other values on a rank than in the whole model."""


class NotCompared(RuntimeError):
    """Why a forward on a rank cannot be compared with the whole one."""


class Alone:
    """In place of a group's transport and position: ranks meet nobody in a trial, and who asks is not tried."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotCompared(f"a forward calls {name} over the ranks")


def filled(p: Tensor, made: torch.Generator) -> nn.Parameter:
    """Values for a parameter that stays whole; those of a large one repeat a row."""
    rows = p.shape if p.numel() <= _SMALL else (1, *p.shape[1:])
    values = torch.randn(rows, generator=made, dtype=torch.float64) if p.is_floating_point() else torch.zeros(rows)
    return nn.Parameter(values.to(_wide(p.dtype)).expand(p.shape), requires_grad=False)


def is_large(module: nn.Module) -> bool:
    """Whether it is a linear layer whose values, if it stays whole, take long to make up."""
    return type(module) is nn.Linear and module.weight.numel() > _SMALL


def mixed(shape: torch.Size, x: Tensor) -> Tensor:
    """What such a layer gives in place of its product: one with a matrix of rank one."""
    made = torch.Generator().manual_seed(1)
    out, features = (torch.randn(n, generator=made, dtype=torch.float64) for n in shape)
    return (x @ features)[..., None] * out


def widened(t: Tensor) -> Tensor:
    return t.to("cpu", _wide(t.dtype)) if not t.is_meta else torch.zeros(t.shape, dtype=_wide(t.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


class MadeUp:
    """What the layers ``made`` gave in a forward of the whole model, and what they read: ``on(rank)`` compares another
    forward with it, in which each gives and reads what a rank has; ``on(None)`` a second one of the whole model."""

    def __init__(self, made: Mapping[nn.Module, tuple[Cut, ParallelModule]]) -> None:
        self.made = made
        self.read: list[tuple[nn.Module, Tensor]] = []
        self.gave: list[Tensor] = []
        self.outputs: list[Tensor] | None = None
        self.on(None)

    def on(self, rank: int | None) -> MadeUp:
        self.calls, self.generator = 0, torch.Generator().manual_seed(0)
        self._indices = defaultdict[nn.Module, Tensor | None](lambda: None)
        for module, (cut, layer) in self.made.items() if rank is not None else ():
            if cut.style in OPENS | CLOSES:
                self._indices[module] = layer.shard_specs["weight"].source_index(layer.tp.size)[rank]
        return self

    def compute(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """What ``module`` gives in place of its forward's output."""
        cut, layer = self.made[module]
        x = next(nested.tensors((args, kwargs)))
        if self.outputs is None:
            self.read.append((module, x.detach().clone()))
            self.gave.append(torch.randn(_shape(x, cut, layer), generator=self.generator, dtype=torch.float64))
            return self.gave[-1].clone()
        self.calls += 1
        reader, read = self.read[self.calls - 1] if self.calls <= len(self.read) else (None, x)
        if reader is not module:
            raise NotCompared("layers are called in another order")
        index = self._indices[module]
        if index is not None and cut.style in CLOSES:
            here = index >= 0
            read, x = read[..., index[here]], x[..., here] if x.shape[-1] == len(here) else x
        _compare("reads", x, read)
        gave = self.gave[self.calls - 1].clone()
        return gave if index is None or cut.style in CLOSES else gave[..., index].masked_fill(index < 0, 0)

    def end(self, output: Any) -> None:
        """``output``: the whole forward's, or one to be compared with it."""
        tensors = [t for t in nested.tensors(output) if t.is_floating_point()]
        if self.outputs is None:
            self.outputs = [t.detach().clone() for t in tensors]
        for here, whole in zip(tensors, self.outputs, strict=False):
            if here.shape == whole.shape:
                _compare("returns", here, whole)


def _shape(x: Tensor, cut: Cut, layer: ParallelModule) -> tuple[int, ...]:
    spec = layer.shard_specs.get("weight")
    if spec is None:
        return tuple(x.shape)  # experts
    if not x.is_floating_point():
        return (*x.shape, spec.shape[1])
    return (*x.shape[:-1], spec.shape[int(hasattr(cut.module, "nf"))])


def _compare(what: str, here: Tensor, whole: Tensor) -> None:
    if here.shape != whole.shape:
        raise OtherValues(f"{what} a tensor of shape {tuple(here.shape)}, where a rank's part has {tuple(whole.shape)}")
    if here.is_floating_point() and here.numel():
        apart = (here - whole).abs().nan_to_num().max()
        if apart > _TOLERANCE * (1 + whole.abs().nan_to_num(posinf=0).max()):
            raise OtherValues(f"{what} other values on a rank than in the whole model, up to {apart:.2g} apart")


MORE = ["", "b", "bs", "ids"]
"""What else a forward may need: a number, one for each example, one for each token, or tokens."""


def needed(model: nn.Module) -> list[str]:
    """The arguments that a forward needs besides transformers' inputs for a trial."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return [name for name in names[1:] if name not in cast(Any, model).dummy_inputs]


def inputs_of(model: Any, labels: bool, given: str | None) -> dict[str, Any]:
    inputs = dict(model.dummy_inputs)
    ids = inputs.get("input_ids")
    if labels and takes(model, "labels"):
        inputs["labels"] = ids
    if given is not None and ids is not None:
        more = ids if given == "ids" else torch.ones(ids.shape[: len(given)], dtype=torch.float64)
        inputs |= {name: ids if name == "labels" else more for name in needed(model)}
    return inputs
