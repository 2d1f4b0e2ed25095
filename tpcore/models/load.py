"""Which experts the routers of a model choose: the load of each expert, summed in forward hooks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime.context import ParallelContext, current
from .experts import ShardedExperts

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

    >>> load = tpcore.models.ExpertLoad(model)
    >>> ...                        # some steps
    >>> for layer, (share, entropy, dropped) in load.read().items():
    ...     print(layer, share.max(), entropy, dropped)

    The counts stay on the device, and nothing is read of it before ``read``. A forward that is run again by activation
    checkpointing is counted again, which changes no share. ValueError for a model without experts.
    """

    def __init__(self, model: nn.Module, ctx: ParallelContext | None = None) -> None:
        self._ctx = ctx or current()
        layers = {name: module for name, module in model.named_modules() if _NUMBERS in _arguments(module)}
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layer of experts that are chosen by number ({_NUMBERS}=)")
        self._counts: dict[str, Tensor] = {}
        self._dropped: dict[str, Tensor] = {}
        self._watched = {name: layer for name, layer in layers.items() if isinstance(layer, ShardedExperts)}
        self._watchers = {name: self._watcher(name) for name in self._watched}
        for name, layer in self._watched.items():
            layer.watchers.append(self._watchers[name])
        self._handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, module in layers.items()
        ]

    def read(self) -> dict[str, Load]:
        """By name of the layer of experts; counting starts anew. Collective over the data ranks."""
        found = {}
        for name, counts in self._counts.items():
            total = self._ctx.data.all_reduce(counts).cpu().double()
            made = total.sum().clamp_min(1)
            share = total / made
            entropy = -float(torch.special.xlogy(share, share).sum()) / math.log(max(len(share), 2))
            found[name] = Load(share, entropy, float(self._all_dropped(name, counts)) / float(made))
        self._counts.clear()
        self._dropped.clear()
        return found

    def _all_dropped(self, name: str, counts: Tensor) -> Tensor:
        """On each rank, for a capacity is the same on all."""
        dropped = self._ctx.data.all_reduce(self._dropped.get(name, counts.new_zeros(1)))
        layer = self._watched.get(name)
        return layer.tp.all_reduce(dropped) if layer is not None and layer.distributed else dropped

    def close(self) -> None:
        """Count no further forward."""
        for handle in self._handles:
            handle.remove()
        for name, layer in self._watched.items():
            layer.watchers.remove(self._watchers[name])

    def _watcher(self, name: str) -> Callable[[Tensor], None]:
        def watch(dropped: Tensor) -> None:
            self._dropped[name] = self._dropped[name] + dropped if name in self._dropped else dropped

        return watch

    def _hook(self, name: str) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = _signature(module).bind_partial(*args, **kwargs).arguments[_NUMBERS].detach().flatten()
            counts = self._counts.get(name)
            if counts is None:
                size = max(_sizes(module))
                counts = self._counts[name] = torch.zeros(size, dtype=torch.int64, device=chosen.device)
            counts.scatter_add_(0, chosen.long(), torch.ones_like(chosen, dtype=torch.int64))

        return count


def _signature(module: nn.Module) -> inspect.Signature:
    inner = module.inner if isinstance(module, ShardedExperts) else module
    return inspect.signature(inner.forward)


def _arguments(module: nn.Module) -> set[str]:
    return set(_signature(module).parameters)


def _sizes(module: nn.Module) -> Iterator[int]:
    """The first dims of the whole parameters: the number of experts."""
    for name, p in module.named_parameters(recurse=False):
        yield module.shard_specs[name].shape[0] if isinstance(module, ShardedExperts) else p.shape[0]
