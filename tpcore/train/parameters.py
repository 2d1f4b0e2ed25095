"""The distinct parameters of an argument, and the refusal of parameters that tpcore cannot reduce."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.comm import Comm
from ..layers.sharding import sharding, stamped
from ..layout.mesh import DATA
from ..runtime.context import current

Parameters = nn.Module | Tensor | Iterable[Tensor]


def unique_parameters(parameters: Parameters) -> list[Tensor]:
    """Every parameter once, also tied ones; checked by ``check_parameters``. Generators are allowed."""
    if isinstance(parameters, nn.Module):
        named = {id(p): (name, p) for name, p in parameters.named_parameters()}
        unique: list[Tensor] = [p for _, p in named.values()]
        names = [repr(name) for name, _ in named.values()]
    else:
        tensors: Iterable[Tensor] = [parameters] if isinstance(parameters, Tensor) else parameters
        unique = list({id(p): p for p in tensors}.values())
        names = [f"{i}" for i in range(len(unique))]
    check_parameters(unique, names)
    return unique


def check_parameters(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ValueError for parameters that torch's own parallelism has cut, that are on another context's mesh, or
    whose marks contradict their layout: their norm and mean would be taken over the wrong ranks."""
    ctx = current()
    for name, p in zip(names, parameters, strict=True):
        # by name: the core does not import torch's own parallelism
        if any(cls.__name__ == "DTensor" for cls in type(p).__mro__):
            raise ValueError(
                f"parameter {name} is a DTensor: fully_shard (FSDP2) or torch's tensor parallelism has cut "
                "it, and tpcore would reduce it over the wrong ranks. Step and clip such a model by torch's "
                "own functions; or cut it with tpcore's layers, and its optimizer's state with tpcore.Zero1"
            )
        try:
            mark = sharding(p)
        except ValueError as e:
            raise ValueError(f"parameter {name}: {e}") from None
        if mark is not stamped(p):
            ctx.marked[id(p)] = ref(p)
        if mark is not None and (mark.ctx.backend is not ctx.backend or mark.ctx.place != ctx.place):
            raise ValueError(
                f"parameter {name} of shape {tuple(p.shape)} was built under another context, on mesh "
                f"{dict(mark.ctx.mesh.axes)} of rank {mark.ctx.rank}, and the context in force has mesh "
                f"{dict(ctx.mesh.axes)} of rank {ctx.rank}: its collectives are others. Build the model "
                "after tpcore.init, inside the tpcore.use that steps it"
            )


def data_comm(p: Tensor) -> Comm:
    """Over the ranks that have the same entries of ``p`` and gradients of other examples or tokens: all of the data
    axes but those that ``p`` is sharded over, as experts are over ep."""
    ctx, mark = current(), sharding(p)
    cut = mark.axes if mark is not None else ()
    return ctx.comm(*(axis for axis in ctx.mesh.present(DATA) if axis not in cut))


def average_experts(parameters: Iterable[Tensor]) -> None:
    """Let the gradient of experts that a script has marked itself, accumulated or to come, count as one batch of those
    of all ep ranks: backward takes this mean of tpcore's own experts."""
    ctx = current()
    for p in parameters:
        mark = sharding(p)
        of = [ctx.mesh.axes[axis] for axis in mark.axes if axis in DATA] if mark is not None else []
        known = ctx.averaged.get(id(p))
        if of and mark is not stamped(p) and p.requires_grad and (known is None or known() is not p):
            ctx.averaged[id(p)] = ref(p)
            p.register_hook(partial(torch.mul, other=1 / prod(of)))
            if p.grad is not None:
                p.grad.div_(prod(of))


def check_for_parts(parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """``check_parameters`` of an optimizer whose state is sharded over dp, and ``average_experts``. ValueError for a
    parameter that is sharded over dp or cp itself. Over ep it may be."""
    check_parameters(parameters, names)
    for name, p in zip(names, parameters, strict=True):
        mark = sharding(p)
        cut = [axis for axis in mark.axes if axis in DATA and axis != "ep"] if mark is not None else []
        if mark is not None and cut:
            raise ValueError(
                f"parameter {name} is sharded over {cut[0]} already, as {mark.layout}: its gradient is no mean over "
                f"{cut[0]} ranks. Give such parameters to an optimizer of their own"
            )
    average_experts(parameters)


def names_of(groups: Iterable[dict[str, Any]]) -> list[str]:
    """The parameters' names in errors, over all groups of an optimizer: their numbers if it has no names."""
    names: list[str] = []
    for group in groups:
        group_names, first = group.get("param_names"), len(names)
        names += map(repr, group_names) if group_names else map(str, range(first, first + len(group["params"])))
    return names


def named_of(group: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    """A group's parameters, and their names in errors. ValueError for a parameter that is given twice."""
    params = group["params"]
    if not isinstance(params, set):  # torch refuses sets, which have no order
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
    named = [item if isinstance(item, tuple) else (None, item) for item in group["params"]]
    names = [f"{i}" if name is None else repr(name) for i, (name, _) in enumerate(named)]
    seen: dict[int, str] = {}
    for name, (_, p) in zip(names, named, strict=True):
        if id(p) in seen:
            raise ValueError(f"parameter {name} is given twice in one group, before as {seen[id(p)]}")
        seen[id(p)] = name
    return [p for _, p in named], names


def check_not_replaced(groups: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError, where no parameter of an optimizer got a gradient, if ``fully_shard`` was called in this
    process: it makes other Parameters, and an optimizer of the old ones changes nothing."""
    # a class of each module is derived from FSDPModule; the core does not import torch's own parallelism
    fully_sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", object)
    if fully_sharded is object or not fully_sharded.__subclasses__():
        return
    groups = list(groups)
    parameters = chain.from_iterable(group["params"] for group in groups)
    names = [name for name, p in zip(names_of(groups), parameters, strict=True) if p.requires_grad]
    if names:
        more = f" and {len(names) - 5} more" if names[5:] else ""
        raise ValueError(
            f"parameters {', '.join(names[:5])}{more} of this optimizer got no gradient: fully_shard (FSDP2) has put "
            "DTensors in their place since it was made, so it would train nothing. Step such a model by torch's own "
            "optimizer, made after fully_shard; or cut it with tpcore's layers, and its optimizer's state with "
            "tpcore.Zero1"
        )


def name_parameters(optimizer: Optimizer, model: nn.Module, *, others: bool = False) -> None:
    """Give groups without names those of ``model``, by which another mesh finds the parameters' state. ValueError for
    parameters that are not the model's, unless there may be ``others``: then no group is named."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    foreign = [i for i, group in enumerate(optimizer.param_groups) if not all(p in names for p in group["params"])]
    if foreign and not others:
        raise ValueError(
            f"group {foreign[0]} of the optimizer has parameters that are not those of {type(model).__name__}, which "
            "it would not train: make the optimizer of model.named_parameters(), after what replaces parameters"
        )
    for group in () if foreign else optimizer.param_groups:
        group.setdefault("param_names", [names[p] for p in group["params"]])
