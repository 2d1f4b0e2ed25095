"""How a plain module becomes a parallel layer: it gets this rank's part of its parameters, and keeps what is attached.

A hook, a buffer or an attribute that somebody put on a module is the module's own: a layer takes over the tables in
which torch keeps them, and in place of a module of a model it is the same object. What was made for whole features gets
whole features, also where a rank has a part of them, or is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..private import BACKWARD_HOOKS, FORWARD_HOOKS, accumulation_hooks, backward_hooks
from .features import Features
from .module import Device, ParallelModule

Layer = TypeVar("Layer", bound=ParallelModule)
Plain = TypeVar("Plain", bound=nn.Module)
_TABLES = frozenset(vars(nn.Module()))
"""Where torch keeps what a module has: parameters, buffers, children and hooks."""


def checked_plain(plain: nn.Module, kind: type[nn.Module], layer: type[nn.Module]) -> Any:
    """``plain``, if it computes what ``kind`` does. ValueError for another module, and for a forward of its own (an
    embedding that scales its output), of its class or set on it, which a layer would silently lose."""
    if not isinstance(plain, kind):
        raise ValueError(f"{layer.__name__}.from_plain takes a torch.nn.{kind.__name__}, not {type(plain).__name__}")
    if type(plain).forward is not kind.forward or type(plain).__call__ is not kind.__call__:
        raise ValueError(
            f"{layer.__name__}.from_plain: {type(plain).__name__} has a forward of its own, which would be "
            f"lost; replace its torch.nn.{kind.__name__} inside, or write a layer for it"
        )
    return plain


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook sees what enters or leaves ``module``."""
    return any(vars(module)[name] for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS))


HOOKED = "_tpcore_hooked"
"""The mark of a layer that had hooks before it was sharded."""


def filled(layer: Layer, plain: nn.Module) -> Layer:
    """``layer``, which is on meta, as ``plain`` is: with this rank's part of its parameters and all that is attached to
    it. ``plain`` stays as it is. Where what enters and leaves is whole, the layer is an instance of its class too."""
    _check(layer, plain)
    for name in layer.shard_specs:
        whole = plain.get_parameter(name)
        part = nn.Parameter(part_of(layer, name, whole.detach()), requires_grad=whole.requires_grad)
        vars(part).update(vars(whole))
        for hook in backward_hooks(whole) if part.requires_grad else ():
            part.register_hook(hook)
        for hook in accumulation_hooks(whole).values():
            part.register_post_accumulate_grad_hook(hook)
        layer.register_parameter(name, part)
    for name, value in vars(plain).items():
        if name not in _TABLES:
            vars(layer)[name] = vars(layer).get(name, value)
        elif name != "_parameters":
            own, vars(layer)[name] = vars(layer)[name], copy.copy(value)
            if isinstance(value, dict):
                vars(layer)[name].update(own)
    layer.plain_type = type(plain)
    if type(layer).sides is not ParallelModule.sides:
        see_whole(layer)
    if not any(layer.sides):
        both: Any = _as_both  # of classes, which mypy takes for no keys
        layer.__class__ = both(type(layer), type(plain))
    return layer


def _check(layer: ParallelModule, plain: nn.Module) -> None:
    """ValueError for what ``layer`` cannot take over from ``plain``."""
    for what in chain(_unfit(layer, plain), _partly(layer, plain)):
        raise ValueError(f"{type(layer).__name__}.from_plain: {type(plain).__name__} has {what}")


def _unfit(layer: ParallelModule, plain: nn.Module) -> Iterator[str]:
    own = dict(plain.named_parameters(recurse=False))
    if layer.shard_specs.keys() != own.keys():
        yield (
            f"the parameters {sorted(own)}, not {sorted(layer.shard_specs)}: a parametrized or pruned one is made of "
            "others in each forward, here of parts; parametrize.remove_parametrizations, or prune.remove, of "
            "torch.nn.utils makes it one"
        )
    for name, p in own.items():
        if p.shape != layer.shard_specs[name].shape:
            yield f"{name} of shape {tuple(p.shape)}, not {layer.shard_specs[name].shape}"
    attached = {**vars(plain), **plain._buffers, **plain._modules}
    clashes = [name for name, value in attached.items() if name not in _TABLES and _differs(layer, plain, name, value)]
    if clashes:
        yield f"{', '.join(clashes)}, and the layer others of these names: rename them"


def _partly(layer: ParallelModule, plain: nn.Module) -> Iterator[str]:
    if "forward" in vars(plain):
        yield (
            "a forward of its own, set on it, which would compute with this rank's part of the parameters: delete it "
            "(accelerate.hooks.remove_hook_from_module, if it is accelerate's), and register a forward hook"
        )
    if any(layer.sides) and (own := sorted(_of_subclass(type(plain)))):
        yield (
            f"a class that adds {', '.join(own)} to torch's, which a layer with a part of the features cannot have: "
            "put that on a module around it, or leave this one whole with the style 'replicate'"
        )
    if any(layer.sides) and any(vars(plain)[name] for name in BACKWARD_HOOKS):
        yield "backward hooks, which would see a rank's part of the gradients: register them on the module around it"
    partly = ("sequence_parallel", "tokens", "input_is_copied", "skip_bias_add")
    if is_hooked(plain) and (
        any(getattr(layer, name, None) for name in partly) or getattr(layer, "sequence_dim", None) is not None
    ):
        yield "hooks, which would see this rank's tokens, or a part of a sum: register them on the layer, for those"


def _of_subclass(kind: type[nn.Module]) -> Iterator[str]:
    """What classes derived from torch's, or from transformers', add to it, or have of their own."""
    for part in kind.__mro__:  # by the place, for a user's class may derive from any of theirs
        if part.__module__.startswith(("torch.nn.", "transformers.")):
            return
        yield from (name for name in vars(part) if not name.startswith("__") and name not in _ANY_SUBCLASS)


_ANY_SUBCLASS = {"forward", "reset_parameters", "extra_repr"}
"""What a layer has its own of: a forward that is not torch's was refused."""


def _differs(layer: ParallelModule, plain: nn.Module, name: str, value: object) -> bool:
    if name not in vars(layer):  # a list called outputs would hide a method
        return hasattr(type(layer), name) and not hasattr(type(plain), name)
    own = vars(layer)[name]
    alike = type(own) is type(value) or (isinstance(value, Tensor) and isinstance(own, int) and not value.dim())
    return own is not value and not (alike and own == value)


@cache
def _as_both(layer: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    """``layer`` that is a ``plain`` too: libraries ask whether a model's embedding and head are torch's, and so may
    they, for what they take and return. A layer with a part of the features is not: who knows ``nn.Linear`` puts
    another in its place, or takes its weight for the whole."""
    if issubclass(layer, plain):
        return layer
    return type(layer.__name__, (layer, plain), {"__module__": plain.__module__})  # no layer of the library's own


@dataclass(frozen=True)
class _OnWhole:
    """A hook of a forward that was made for whole features, on a layer that takes or returns a part of them: the
    features of all ranks are gathered for it, and this rank's kept of what it returns."""

    hook: Callable[..., Any]
    after: bool

    def __call__(self, layer: Any, args: tuple[Any, ...], *rest: Any) -> Any:
        owner: ParallelModule = layer if isinstance(layer, ParallelModule) else layer.base_layer
        inputs, outputs = owner.sides
        given = tuple(_gathered(owner, inputs, value) for value in args)
        if self.after:
            *kwargs, output = rest
            whole = _gathered(owner, outputs, output)
            result = self.hook(layer, given, *kwargs, whole)
            return _kept(owner, outputs, whole if result is None else result)
        result = self.hook(layer, given, *rest)
        if rest:  # it takes keywords, and returns both
            given, kwargs = result or (given, *rest)
            return tuple(_kept(owner, inputs, value) for value in given), kwargs
        given = given if result is None else result if isinstance(result, tuple) else (result,)
        return tuple(_kept(owner, inputs, value) for value in given)


def _gathered(layer: ParallelModule, features: Features | None, x: Any) -> Any:
    return x if features is None or not isinstance(x, Tensor) else features.gathered(x, layer.tp)


def _kept(layer: ParallelModule, features: Features | None, x: Any) -> Any:
    if features is None or not isinstance(x, Tensor):
        return x
    part = layer.as_part(features.mask(features.scatter(x, layer.tp), layer.tp), -1, "features")
    if features.padded or features.order is not None:
        setattr(part, ops.FEATURES, features)
    return part


def see_whole(module: nn.Module) -> None:
    """Let the hooks of a module's forward, which has a layer's inputs and outputs, see the features of all ranks."""
    if is_hooked(module):
        vars(module)[HOOKED] = True
    for name, after in zip(FORWARD_HOOKS, (False, True), strict=True):
        hooks = vars(module)[name]
        hooks.update({number: _OnWhole(hook, after) for number, hook in hooks.items()})


def adopt(plain: nn.Module, make: Callable[[nn.Module], ParallelModule]) -> None:
    """Let ``plain`` become the layer that ``make`` makes of it, in place, with this rank's part of its parameters."""
    become(plain, prepared(plain, make))
    shard([plain])


def prepared(plain: nn.Module, make: Callable[[nn.Module], Layer]) -> Layer:
    """The layer that ``plain`` can become, still on meta. ValueError, and no change, if it cannot."""
    layer = make(twin(plain, "meta"))
    for name, p in plain.named_parameters(recurse=False):
        if p.grad is not None and p.shape != layer.get_parameter(name).shape:
            raise ValueError(f"{name} has a gradient of its whole: call model.zero_grad() before it is sharded")
    return layer


def twin(plain: Plain, device: Device = None) -> Plain:
    """A module with all that ``plain`` has, in tables of its own; its Parameters without values on ``device``."""
    made = plain.__new__(type(plain))
    vars(made).update({name: copy.copy(value) if name in _TABLES else value for name, value in vars(plain).items()})
    for name, p in made.named_parameters(recurse=False) if device is not None else ():
        made._parameters[name] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
    return made


def become(plain: nn.Module, layer: nn.Module) -> None:
    """Let ``plain`` be what ``layer`` is: the same object, in the same tables, to which handles of hooks refer, with
    its own Parameters, still whole."""
    for name, value in vars(layer).items():
        table = vars(plain).get(name)
        if name in _TABLES and isinstance(table, dict):
            table.update({key: item for key, item in value.items() if name != "_parameters" or table.get(key) is None})
        else:
            vars(plain)[name] = value
    plain.__class__ = type(layer)
    if isinstance(plain, ParallelModule):
        plain._stamp_all()


def shard(layers: Iterable[Any]) -> None:
    """Let the whole Parameters of ``layers`` have this rank's part, and stay the same objects, which an optimizer may
    have. What is tied has one part."""
    done = set[Tensor]()
    for layer in layers:
        layer.known()
        for name in layer.shard_specs:
            p = layer.get_parameter(name)
            if p not in done:
                p.data = part_of(layer, name, p.detach())
                done.add(p)


def part_of(layer: ParallelModule, name: str, whole: Tensor) -> Tensor:
    """This rank's part of ``whole``, on its device."""
    if whole.is_meta:
        return torch.empty(layer.sharding_of(name).local_shape, dtype=whole.dtype, device="meta")
    # a lazy device would record this rank's slice, and the ranks would have different programs
    near = whole if layer.tp.eager else whole.cpu()
    return layer.part_of(name, near).to(whole.device)
