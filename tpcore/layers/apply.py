"""Initial values by a function of one's own for whole modules, on sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.layout import Layout
from ..private import TorchDispatchMode, schema_of
from .adopt import is_hooked
from .module import ParallelModule
from .sharding import Sharding, sharding, stamp


def init_weights(model: nn.Module, fn: Callable[[nn.Module], object]) -> nn.Module:
    """``model.apply(fn)``, where each rank gets its part of what ``fn`` does to whole modules; returns the model.

    ``fn`` gets the model's modules, in the order of ``apply``. Until it returns a sharded layer is of the kind that it
    was made of (``nn.Linear``, ``nn.Embedding``, transformers' ``Conv1D``), with the present whole values on the CPU,
    in the same Parameters, or in others where those of the device take none of the CPU. Every rank draws the random
    numbers of the unsharded model, so that the same seed gives the same values at every degree. One layer's whole is in
    memory at a time. Collective over the ranks of the layers. ValueError for a model on stages, of which a rank has not
    all modules: initialize it before it is sharded.
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
    layer: nn.Module = module  # not of the class of a layer while it shows its whole
    kind, of = type(module), [(n, module.get_parameter(n), module.sharding_of(n)) for n in module.shard_specs]
    parts = [p.detach() for _, p, _ in of]
    refusal = module.register_forward_pre_hook(_refuse_call, prepend=True) if is_hooked(module) else None
    try:
        for (name, p, mark), part in zip(of, parts, strict=True):
            module._parameters[name] = _filled(p, mark.whole(part))
            stamp(p, Sharding(Layout(mark.layout.shape), mark.ctx))
        layer.__class__ = module.plain_type
        fn(module)
        for (name, _, mark), part in zip(of, parts, strict=True):
            part.copy_(mark.part(module.get_parameter(name)))
    finally:
        layer.__class__ = kind
        for (name, p, mark), part in zip(of, parts, strict=True):
            module._parameters[name], p.data = p, part
            stamp(p, mark)
        if refusal is not None:
            refusal.remove()


def _filled(p: nn.Parameter, whole: Tensor) -> nn.Parameter:
    """``p`` itself, for those who know it, with the values of ``whole``; another if its device has no such tensors."""
    try:
        p.data = whole
    except RuntimeError:
        return nn.Parameter(whole, requires_grad=p.requires_grad)
    return p


def _refuse_call(module: nn.Module, args: Any) -> None:
    raise ValueError(
        f"init_weights: the function calls a {type(module).__name__} that is sharded, and whose hooks take parts: "
        "compute from its weight, or initialize the model before it is sharded"
    )


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
