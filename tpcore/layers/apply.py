"""Initial values by a function of one's own for whole modules, on sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..private import TorchDispatchMode, schema_of
from .adopt import twin
from .module import ParallelModule
from .sharding import sharding


def init_weights(model: nn.Module, fn: Callable[[nn.Module], object]) -> nn.Module:
    """``model.apply(fn)``, where each rank gets its part of what ``fn`` does to whole modules; returns the model.

    ``fn`` gets what ``apply`` of the unsharded model gives it, in that order: for a sharded layer a module of the kind
    that it was made of (``nn.Linear``, ``nn.Embedding``, transformers' ``Conv1D``), with the present whole values on
    the CPU. Every rank draws the random numbers of the unsharded model, so that the same seed gives the same values
    at every degree. One layer's whole is in memory at a time. Collective over the ranks of the layers. ValueError for a
    model on stages, of which a rank has not all modules: initialize it before it is sharded.
    """
    for name, p in model.named_parameters():
        mark = sharding(p)
        if mark is not None and mark.ctx.mesh.axes.get("pp", 1) > 1:
            raise ValueError(
                f"init_weights: {name} is on one of pp={mark.ctx.mesh.axes['pp']} stages, and the order of random "
                "numbers is that of all modules: call model.apply(fn) on the whole model, before it is sharded"
            )
    return model.apply(lambda module: initialized(module, fn))


@torch.no_grad()
def initialized(module: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    """Do to ``module`` what ``fn`` does to the whole of it."""
    if not isinstance(module, ParallelModule) or not module.shard_specs:
        with _Inside(module):
            fn(module)
        return
    whole: Any = twin(module)
    whole.__class__ = module.plain_type
    for name in module.shard_specs:
        p = module.get_parameter(name)
        whole._parameters[name] = nn.Parameter(module.sharding_of(name).whole(p), requires_grad=p.requires_grad)
    fn(whole)
    for name in module.shard_specs:
        p = module.get_parameter(name)
        p.copy_(module.part_of(name, whole.get_parameter(name)))


class _Inside(TorchDispatchMode):
    """Where a function fills parameters inside of a module, of which ranks have parts, it fills the wholes of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = ((name, p, sharding(p)) for name, p in module.named_parameters() if not p.is_meta)
        self.parts = {
            p.untyped_storage().data_ptr(): (name, p, mark)
            for name, p, mark in named
            if mark is not None and mark.local_shape != mark.layout.shape
        }

    def __enter__(self) -> Any:
        return super().__enter__() if self.parts else self

    def __exit__(self, *error: Any) -> None:
        if self.parts:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changed = schema_of(func).arguments[:1]
        writes = changed and changed[0].alias_info is not None and changed[0].alias_info.is_write
        part = self.parts.get(args[0].untyped_storage().data_ptr()) if writes else None
        if part is None or any(isinstance(t, Tensor) and t.shape == part[1].shape for t in args[1:]):
            return func(*args, **(kwargs or {}))
        name, p, mark = part
        if args[0].shape != p.shape:
            raise ValueError(
                f"{func.__name__} fills {list(args[0].shape)} of {name}, of which each rank has a part, "
                f"{list(p.shape)}: fill the whole parameter, or do it where the function gets the layer itself"
            )
        whole = mark.whole(p)
        func(whole, *args[1:], **(kwargs or {}))
        p.copy_(mark.part(whole))
        return args[0]
