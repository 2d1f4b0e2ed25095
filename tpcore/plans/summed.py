"""Whole modules of which each rank sees a part of the gradients: the parts are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import ops
from ..comm import Comm

ATTRIBUTE = "_tpcore_summed"


class Switch(Protocol):
    """What knows, in a forward, whether gradients are in parts."""

    active: bool


@dataclass
class Always:
    active: bool = True


@dataclass(frozen=True)
class Summing:
    """One copy of a parameter for each rank: the backward of each use sums what the ranks saw.

    It keeps no state, so that accumulated gradients are summed once. A hook on the accumulated gradient
    would sum again what it has summed before.
    """

    comm: Comm
    switch: Switch

    def __call__(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or not self.switch.active:
            return parameter
        return ops.copy(parameter, self.comm, dtype=torch.float32)


def sum_gradients(module: nn.Module, comm: Comm, switch: Switch | None = None) -> None:
    """Let the gradients of the parameters that ``module`` itself owns be summed over ``comm``.

    Where ``switch`` is off in a forward, that forward's gradients are whole already.
    """
    module.__dict__[ATTRIBUTE] = Summing(comm, switch or Always())
    module.__class__ = _summed(type(module))


def _summed(original: type[nn.Module]) -> type[nn.Module]:
    """``original`` with a forward that computes with what ``Summing`` makes of its parameters.

    A class, and what it needs on the instance: ``deepcopy`` then copies both as they belong together.
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
