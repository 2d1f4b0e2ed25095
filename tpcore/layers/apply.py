"""Initial values by a function of one's own for whole modules, on sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
        with _whole_inside(module):
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


class _Part(NamedTuple):
    """A parameter inside of a module, of which this rank has a part."""

    name: str
    p: nn.Parameter
    mark: Sharding

    def check(self, what: str, t: Tensor) -> None:
        """ValueError unless ``t``, in the memory of the part, is all of it."""
        if t.shape != self.p.shape or t.stride() != self.p.stride():
            raise ValueError(
                f"{what} fills or reads {list(t.shape)} of {self.name}, of which each rank has a part, "
                f"{list(self.p.shape)}: take the whole parameter, or do it where the function gets the layer itself"
            )


class _Parts(dict[int, _Part]):
    """By their places in memory."""

    def of(self, t: object) -> _Part | None:
        strided = isinstance(t, Tensor) and t.layout is torch.strided
        return self.get(t.untyped_storage().data_ptr()) if strided else None  # type: ignore[attr-defined]


@contextmanager
def _whole_inside(module: nn.Module) -> Iterator[None]:
    """In the block the layers inside of ``module`` are of the kinds that they were made of, and what a function asks of
    their parameters, or fills, is of the wholes."""
    named = ((name, p, sharding(p)) for name, p in module.named_parameters() if not p.is_meta)
    parts = _Parts(
        (p.untyped_storage().data_ptr(), _Part(name, p, mark))
        for name, p, mark in named
        if mark is not None and mark.local_shape != mark.layout.shape
    )
    if not parts:
        yield
        return
    layers = [(m, type(m), dict(m._parameters)) for m in module.modules() if isinstance(m, ParallelModule)]
    try:
        for layer, _, _ in layers:
            cast(Any, layer).__class__ = layer.plain_type
        with _Fills(parts), _Sizes(parts):
            yield
    finally:
        for layer, kind, parameters in layers:
            layer.__class__ = kind
            for name, p in parameters.items():
                given, layer._parameters[name] = layer._parameters.get(name), p
                if p is not None and given is not None and given is not p:
                    p.copy_(layer.part_of(name, given) if given.shape != p.shape else given)


class _Fills(TorchDispatchMode):
    """Operations on parts are those on the wholes."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, parts = schema_of(func), [self.parts.of(a) for a in args]
        writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments[:1]] == [True]
        views = not writes and any(r.alias_info is not None for r in schema.returns)
        target = parts[0] if writes else None
        beside = target and any(isinstance(t, Tensor) and t.shape == target.p.shape for t in args[1:])
        if views or beside or not any(parts):
            return func(*args, **(kwargs or {}))
        given = list(args)
        for i, part in enumerate(parts):
            if part is not None:
                part.check(func.__name__, args[i])
                given[i] = part.mark.whole(part.p).to(part.p.device)
        out = func(*given, **(kwargs or {}))
        if target is None:
            return out
        target.p.copy_(target.mark.part(given[0]))
        return args[0]


class _Sizes(TorchFunctionMode):
    """A part has the size of the whole."""

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED and (part := self.parts.of(args[0])) is not None:
            part.check("its size", args[0])
            args = part.p.new_empty(part.mark.layout.shape, device="meta"), *args[1:]
        return func(*args, **(kwargs or {}))


_ASKED = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.__len__}  # type: ignore[attr-defined]
