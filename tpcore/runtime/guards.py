"""Functions of torch and safetensors that take a part for the whole: while a job runs they are right, or refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, parametrize, prune, stateless
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..backend.registry import manager
from ..layout.shard import mark_of
from ..private import CLIPPED, FUNCTIONAL
from .context import current, is_initialized
from .elementwise import steps_asked

PlainFunction = Callable[..., Any]


@dataclass(frozen=True)
class Guard:
    """A function of another library that takes a part for the whole, and what stands in its place while a job runs."""

    owner: Any
    """The module or class that has it, and looks it up in each call."""
    name: str
    replacement: Callable[[PlainFunction], PlainFunction]
    """Makes of the function one that is right for parts, or refuses them."""
    why: str


@contextmanager
def installed(guards: Iterable[Guard]) -> Iterator[None]:
    """In the block, the replacements stand in place of the functions, for all threads."""
    with ExitStack() as undo:
        for guard in list(guards):
            there = vars(guard.owner).get(guard.name)
            if there is None:
                raise ValueError(f"{guard.owner} has no {guard.name}, which tpcore guards, for {guard.why}")
            kind = type(there) if isinstance(there, (classmethod, staticmethod)) else None
            function = there if kind is None else there.__func__
            replacement: Any = wraps(function)(guard.replacement(function))
            undo.callback(setattr, guard.owner, guard.name, there)
            setattr(guard.owner, guard.name, replacement if kind is None else kind(replacement))
        yield


@contextmanager
def whole_tensors_only() -> Iterator[None]:
    """In the block, functions of libraries take sharded parameters for what they are, on every rank: the guards of
    tpcore and of all extensions. So do optimizers."""
    guards = [*_own(), *(guard for added in manager().hook.tpcore_guards() for guard in added or ())]
    with installed(guards), steps_asked():
        yield


def refusing(check: Callable[..., None]) -> Callable[[PlainFunction], PlainFunction]:
    """The replacement that calls ``check``, which may raise, with the arguments of each call before it is made."""

    def replacement(function: PlainFunction) -> PlainFunction:
        def guard(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return guard

    return replacement


IN_FILE = (
    "a tensor of shape {} is one rank's part of {}, and a file would hold it as the whole: model.save_pretrained and "
    "tpcore.checkpoint.save, called on all ranks, write the whole model"
)
_NORM = (
    "torch.nn.utils would see the norm of this rank's part of a gradient, each rank another: call "
    "tpcore.clip_grad_norm(model, max_norm), or tpcore.optimizer_step(optimizer, max_norm=...)"
)


def refuse_in_file(t: object) -> None:
    """ValueError for a part, which a file would have as if it were the whole."""
    if (mark := mark_of(t)) is not None:
        raise ValueError(IN_FILE.format(tuple(mark.local_shape), tuple(mark.layout.shape)))


def _grouped(function: PlainFunction) -> PlainFunction:
    """A guard of what ``torch.nn.utils`` asks of parameters or gradients, which have no marks of their own, before it
    takes a norm, or clips by one, or by value: entry by entry, which is right for parts."""
    by_entry = inspect.unwrap(clip_grad.clip_grad_value_).__code__

    def guard(lists: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        while caller.f_code is guard.__code__ and caller.f_back is not None:  # this guard of an outer job
            caller = caller.f_back
        if caller.f_code is not by_entry:
            layers = current().layers if is_initialized() else ()
            parts = {id(p.grad) for layer in layers for p in layer.parameters() if mark_of(p) is not None}
            if any(mark_of(t) is not None or id(t) in parts for tensors in lists for t in tensors if t is not None):
                raise ValueError(_NORM)
        return function(lists, *args, **kwargs)

    return guard


def _check_module(what: str, *args: Any, **kwargs: Any) -> None:
    """ValueError if ``what`` would be put in the place of a module's sharded parameter. The first arguments, after a
    class perhaps, are the module and the parameter's name."""
    at = 0 if args and isinstance(args[0], nn.Module) else 1
    module = kwargs.get("module", args[at] if len(args) > at else None)
    name = kwargs.get("name", kwargs.get("tensor_name", args[at + 1] if len(args) > at + 1 else ""))
    weight: Any = getattr(module, str(name), None)
    if mark_of(weight) is not None:
        raise ValueError(
            f"{type(module).__name__}.{name} is this rank's part, of shape {tuple(weight.shape)}, and {what} would "
            "take it for the whole weight: leave the layer unsharded, or do it, and make it permanent (remove), "
            "before the layer is converted"
        )


def _check_values(module: nn.Module, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
    """ValueError where ``module`` would compute with the whole of a parameter, and add it up over the ranks."""
    parameters = {} if torch.compiler.is_compiling() else dict(module.named_parameters(remove_duplicate=False))
    for name, given in values.items():
        mark = mark_of(parameters.get(name))
        if mark is not None and isinstance(given, Tensor) and tuple(given.shape) != tuple(mark.local_shape):
            raise ValueError(
                f"functional_call: {name} is this rank's part of {tuple(mark.layout.shape)}, of shape "
                f"{tuple(mark.local_shape)}, and not {tuple(given.shape)}: of whole values give its layer's "
                "part_of(name, whole)"
            )


def _initial(function: PlainFunction) -> PlainFunction:
    """A function of ``torch.nn.init`` that gives a part the values of the whole, as one process draws them."""

    def guard(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mark = mark_of(tensor)
        if mark is None:
            return function(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        with torch.no_grad():
            return tensor.copy_(mark.initial(lambda whole: function(whole, *args, **kwargs), tensor.dtype))

    return guard


@dataclass(frozen=True)
class _OfWhole:
    """A hook that gets the gradient of the whole."""

    hook: Callable[[Tensor], Any]
    mark: Any

    def __call__(self, gradient: Tensor) -> Tensor:
        whole = self.mark.whole(gradient).to(gradient.device)
        changed = self.hook(whole)
        return self.mark.part(whole if changed is None else changed)  # type: ignore[no-any-return]


def _hooked(function: PlainFunction) -> PlainFunction:
    """``Tensor.register_hook``: a hook of a part gets the gradient of the whole, for it may know rows by number."""

    def guard(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        mark = mark_of(tensor)
        # under a mode of torch functions the name is called once more, from inside
        plain = mark is None or isinstance(hook, _OfWhole)
        return function(tensor, hook if plain else _OfWhole(hook, mark))

    return guard


def _own() -> Iterator[Guard]:
    """torch looks these names up at each call, so they guard a ``get_total_norm`` or ``weight_norm`` that a program has
    imported before, too."""
    yield Guard(clip_grad, CLIPPED, _grouped, "the norm of a rank's part is no norm")
    modules = (parametrize, "register_parametrization", "a parametrization"), (WeightNorm, "apply", "a norm of it")
    more = (SpectralNorm, "apply", "a norm of it"), (prune.BasePruningMethod, "apply", "a mask for it")
    for owner, name, what in (*modules, *more):
        yield Guard(owner, name, refusing(partial(_check_module, what)), f"{what} needs the whole weight")
    for name, function in vars(nn.init).items():
        if not name.startswith("_") and callable(function) and name.rstrip("_") + "_" in vars(nn.init):
            yield Guard(nn.init, name, _initial, "values that one process draws")
    yield Guard(stateless, FUNCTIONAL, refusing(_check_values), "layers compute with a rank's part")
    yield Guard(Tensor, "register_hook", _hooked, "hooks that know rows by their numbers")
    # asked by safetensors of each tensor that it writes
    yield Guard(safetensors.torch, "storage_ptr", refusing(refuse_in_file), "files that hold whole tensors")
