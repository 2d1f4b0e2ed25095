"""Sums the gradients of replicated modules if each rank computes only a part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import ops
from ..comm import Comm

ATTRIBUTE = "_tpcore_summed"


class Switch(Protocol):
    """Whether gradients are in parts in the current forward."""

    active: bool


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


def sum_gradients(module: nn.Module, comm: Comm, switch: Switch | None = None) -> None:
    """Sum the gradients of ``module``'s own parameters, not its children's, over ``comm``.

    If ``switch`` is off in a forward, that forward's gradients are whole already.
    """
    module.__dict__[ATTRIBUTE] = Summing(comm, switch or Always())
    module.__class__ = _summed(type(module))


def _summed(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``original`` whose forward uses the copies that ``Summing`` makes of the parameters.

    It is a class with its data on the instance, so that ``deepcopy`` copies both together.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # not functional_call: it calls the module, whose hooks would run a second time
        kept, summing = self.__dict__["_parameters"], self.__dict__[ATTRIBUTE]
        self.__dict__["_parameters"] = {name: summing(p) for name, p in kept.items()}
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            self.__dict__["_parameters"] = kept

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "forward": forward}
    return type(original.__name__, (original,), names)
