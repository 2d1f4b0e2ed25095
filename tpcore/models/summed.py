"""Modules of which each rank computes a part: gradients are summed, parameters go by heads, and some pass by whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm

ATTRIBUTE = "_tpcore_summed"


Switch = Callable[[], bool]
"""Whether gradients are in parts in the current forward. A copy of the module has to have its own."""


@dataclass(frozen=True)
class Summing:
    """``ops.copy`` of a parameter: the backward of each use sums the ranks' gradients. A hook on the accumulated
    gradient would sum earlier ones again."""

    comm: Comm
    switch: Switch | None

    def __call__(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or not (self.switch is None or self.switch()):
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
    """Sum the gradients of ``module``'s own parameters, not its children's, over ``comm``, in forwards in which
    ``switch`` is on."""
    _substitute(module, Summing(comm, switch))


def select_heads(module: nn.Module, comm: Comm, copies: int) -> None:
    """Let ``module`` use this rank's heads of its own parameters, and of its list of one module per head."""
    _substitute(module, LocalHeads(comm, copies))


def _substitute(module: nn.Module, function: Callable[[Tensor | None], Tensor | None]) -> None:
    """Let ``module``'s forward use what ``function`` makes of the parameters. By a class with its data on the instance,
    so that ``deepcopy`` copies both together."""
    original = type(module)

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

    module.__dict__[ATTRIBUTE] = function
    module.__class__ = with_forward(original, forward)


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


def go_around(projection: nn.Module, attention: nn.Module, comm: Comm) -> None:
    """Sum the gradient of the rotary key, the last features of ``projection``, which the heads of all ranks share. The
    other features, the latent ones, meet a sharded layer that sums theirs (DeepSeek-V2, arXiv:2405.04434)."""
    width: Any = getattr(attention, "qk_rope_head_dim", None)  # 0 in a layer without positions
    width = attention.config.qk_rope_head_dim if width is None else width  # type: ignore[union-attr]
    projection.register_forward_hook(_Rotary(comm, int(width)))


@dataclass(frozen=True)
class _Rotary:
    comm: Comm
    width: int

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - self.width, self.width], -1)
        return torch.cat([latent, ops.copy(rotary, self.comm, dtype=torch.float32)], -1)


def share_identity(expert: nn.Module, comm: Comm) -> None:
    """Let an expert that returns its input return a rank's share of it: the outputs of all ranks are summed."""
    expert.register_forward_pre_hook(partial(_share, comm.size))


def _share(ranks: int, expert: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0] / ranks, *args[1:]
