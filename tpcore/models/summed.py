"""Replicated modules of which each rank computes a part: gradients are summed, or parameters go by heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm

ATTRIBUTE = "_tpcore_summed"


class Switch(Protocol):
    """Whether gradients are in parts in the current forward."""

    @property
    def active(self) -> bool: ...


@dataclass
class Always:
    active: bool = True


@dataclass(frozen=True)
class Summing:
    """``ops.copy`` of a parameter: the backward of each use sums the ranks' gradients.

    It keeps no state, so accumulated gradients are summed once. A hook on the accumulated gradient would sum
    the earlier gradients again.
    """

    comm: Comm
    switch: Switch

    def __call__(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or not self.switch.active:
            return parameter
        return ops.copy(parameter, self.comm, dtype=torch.float32)


@dataclass(frozen=True)
class LocalHeads:
    """This rank's part of a tensor with an entry for each head; the backward gathers. ``copies``: how many
    ranks have each head."""

    comm: Comm
    copies: int

    def __call__(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        return ops.scatter(parameter.repeat_interleave(self.copies, 0), self.comm, 0)


def sum_gradients(module: nn.Module, comm: Comm, switch: Switch | None = None) -> None:
    """Sum the gradients of ``module``'s own parameters, not its children's, over ``comm``.

    If ``switch`` is off in a forward, that forward's gradients are whole already.
    """
    _substitute(module, Summing(comm, switch or Always()))


def select_heads(module: nn.Module, comm: Comm, copies: int) -> None:
    """Let ``module`` use this rank's heads of its own parameters, and of its list of one module per head."""
    _substitute(module, LocalHeads(comm, copies))


def _substitute(module: nn.Module, function: Callable[[Tensor | None], Tensor | None]) -> None:
    module.__dict__[ATTRIBUTE] = function
    module.__class__ = _substituted(type(module))


def _substituted(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``original`` whose forward uses what the instance's function makes of the parameters.

    It is a class with its data on the instance, so that ``deepcopy`` copies both together.
    """

    @wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # not functional_call: it calls the module, whose hooks would run a second time
        kept = []
        try:
            for module, where, values in _substitutes(self):
                kept.append((module, where, module.__dict__[where]))
                module.__dict__[where] = values
            return original.forward(self, *args, **kwargs)
        finally:
            for module, where, values in kept:
                module.__dict__[where] = values

    return with_forward(original, forward)


def with_forward(original: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of ``original`` with its name and signature, and another ``forward``."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {**names, "forward": wraps(original.forward)(forward)})


def _substitutes(module: nn.Module) -> Iterator[tuple[nn.Module, str, dict[str, Any]]]:
    """(module, its table of parameters or of children, what stands there in a forward)."""
    function = module.__dict__[ATTRIBUTE]
    yield module, "_parameters", {name: function(p) for name, p in module._parameters.items()}
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    for of_heads in lists if isinstance(function, LocalHeads) else ():
        every = list(of_heads.children())
        names = [name for name, _ in every[0].named_parameters()]
        local = {name: function(torch.stack([e.get_parameter(name) for e in every])) for name in names}
        mine = every[: len(local[names[0]])]
        yield of_heads, "_modules", {str(i): element for i, element in enumerate(mine)}
        for i, element in enumerate(mine):
            yield element, "_parameters", {**element._parameters, **{n: t[i] for n, t in local.items()}}
