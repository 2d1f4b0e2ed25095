"""Which experts the routers of a model choose: the load of each expert, summed in forward hooks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcore.private import backward_number
from tpcore.runtime.context import ParallelContext, current
from tpcore.train.pipeline import PipelinedLayers

from .layers import ShardedExperts

_NUMBERS = "top_k_index"  # the argument of a layer of experts


class Load(NamedTuple):
    """Of one layer. ``share``: ``[experts]`` float64, the part of all choices that fell to each, over all batches and
    tokens of the data ranks. ``entropy``: of these, 1 where all are chosen alike and 0 where one is always.
    ``dropped``: the part of all choices for which ``capacity_factor`` of ``tpcore.parallelize`` left no seat."""

    share: Tensor
    entropy: float
    dropped: float


class ExpertLoad:
    """Counts the choices of routers in every forward of ``model`` until ``close()``, also without ``parallelize``.

    The counts stay on the device, and nothing is read of it before ``read``. What backward computes again, and what a
    stage computes of no microbatch, does not count. ValueError for a model without experts.
    """

    def __init__(self, model: nn.Module, ctx: ParallelContext | None = None) -> None:
        self._ctx = ctx or current()
        self._layers = {n: m for n, m in model.named_modules() if _NUMBERS in _signature(m).parameters}
        if not self._layers:
            raise ValueError(f"{type(model).__name__} has no layer of experts that are chosen by number ({_NUMBERS}=)")
        self._stages = [m.stage for m in model.modules() if isinstance(m, PipelinedLayers)]
        self._counts: dict[str, Tensor] = {}
        self._dropped: dict[str, Tensor] = {}
        self._ends = []
        for name, layer in self._layers.items():
            hook = layer.register_forward_pre_hook(partial(self._count, name), with_kwargs=True)
            self._ends.append(hook.remove)
            if isinstance(layer, ShardedExperts):
                layer.watchers.append(watcher := partial(self._drop, name))
                self._ends.append(partial(layer.watchers.remove, watcher))

    def read(self) -> dict[str, Load]:
        """By name of the layer of experts; counting starts anew. Collective over the data ranks."""
        loads = {}
        for name, layer in self._layers.items():  # also without a forward here: another rank may have had one
            total = self._ctx.data.all_reduce(self._counts.get(name, self._none(name))).cpu().double()
            choices = total.sum().clamp_min(1)
            share = total / choices
            entropy = -float(torch.special.xlogy(share, share).sum()) / math.log(max(len(share), 2))
            dropped = self._ctx.data.all_reduce(self._dropped.get(name, self._none(name)[:1]))
            if isinstance(layer, ShardedExperts) and layer.distributed:
                dropped = layer.tp.all_reduce(dropped)
            if total.any():
                loads[name] = Load(share, entropy, float(dropped) / float(choices))
        self._counts.clear()
        self._dropped.clear()
        return loads

    def close(self) -> None:
        """Count no further forward."""
        for end in self._ends:
            end()

    def _none(self, name: str) -> Tensor:
        # the first dims of whole parameters are the number of experts
        layer = self._layers[name]
        parameters = dict(layer.named_parameters(recurse=False))
        marks: Mapping[str, Any] = layer.shard_specs if isinstance(layer, ShardedExperts) else parameters
        size = max(marks[key].shape[0] for key in parameters)
        return torch.zeros(size, dtype=torch.int64, device=next(iter(parameters.values())).device)

    def _weight(self) -> Tensor | int:
        """Of what a layer computes now."""
        if not torch.compiler.is_compiling() and backward_number() != -1:
            return 0  # in backward
        return next((stage.counts().to(torch.int64) for stage in self._stages if stage.counts is not None), 1)

    def _drop(self, name: str, dropped: Tensor) -> None:
        self._dropped[name] = self._dropped.get(name, 0) + dropped * self._weight()

    def _count(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = _signature(module).bind_partial(*args, **kwargs).arguments[_NUMBERS].detach().flatten()
        if name not in self._counts:
            self._counts[name] = self._none(name)
        # of this call in float32, as in _places, and of all of them in whole numbers
        each = torch.zeros_like(self._counts[name], dtype=torch.float32)
        each = each.scatter_add(0, chosen.long(), torch.ones_like(chosen, dtype=torch.float32))
        self._counts[name] += each.long() * self._weight()


def _signature(module: nn.Module) -> inspect.Signature:
    return inspect.signature(module.own_forward if isinstance(module, ShardedExperts) else module.forward)
