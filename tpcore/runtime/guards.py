"""Functions of torch and safetensors that take a part for the whole: while a job runs they are right, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .context import current, is_initialized

Function = Callable[..., Any]

IN_FILE = (
    "a tensor of shape {} is one rank's part of {}, and a file would hold it as the whole: model.save_pretrained and "
    "tpcore.checkpoint.save, called on all ranks, write the whole model; tpcore_hf.full_state_dict gathers it"
)
_NORM = (
    "torch.nn.utils would see the norm of this rank's part of a gradient, each rank another: call "
    "tpcore.clip_grad_norm(model, max_norm), or tpcore.optimizer_step(optimizer, max_norm=...)"
)


def mark_of(t: object) -> Any:
    """The mark of a tensor of which other ranks hold other entries; None for any other."""
    mark = getattr(t, "tpcore_sharding", None)
    return mark if getattr(mark, "axes", ()) else None


def refuse_in_file(t: object) -> None:
    """ValueError for a part, which a file would have as if it were the whole."""
    if (mark := mark_of(t)) is not None:
        raise ValueError(IN_FILE.format(tuple(mark.local_shape), tuple(mark.layout.shape)))


def _norm(function: Function) -> Function:
    """A guard of a function of parameters or of gradients, which have no marks of their own."""

    @wraps(function)
    def guard(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        layers = current().layers if is_initialized() else ()
        parts = {id(p.grad) for layer in layers for p in layer.parameters() if mark_of(p) is not None}
        if any(mark_of(t) is not None or id(t) in parts for t in tensors if t is not None):
            raise ValueError(_NORM)
        return function(tensors, *args, **kwargs)

    return guard


def _of_module(what: str, function: Function) -> Function:
    """A guard of ``function``, which puts ``what`` in the place of a module's parameter. Its first arguments, after a
    class perhaps, are the module and the parameter's name."""

    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
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
        return function(*args, **kwargs)

    return guard


def _initial(function: Function) -> Function:
    """A function of ``torch.nn.init`` that gives a part the values of the whole, as one process draws them."""

    @wraps(function)
    def guard(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mark = mark_of(tensor)
        if mark is None:
            return function(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        with torch.no_grad():
            return tensor.copy_(mark.initial(lambda whole: function(whole, *args, **kwargs), tensor.dtype))

    return guard


def _hooked(function: Function) -> Function:
    """``Tensor.register_hook``: a hook of a part gets the gradient of the whole, for it may know rows by number."""

    @wraps(function)
    def guard(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        mark = mark_of(tensor)

        def of_whole(gradient: Tensor) -> Tensor:
            whole = mark.whole(gradient).to(gradient.device)
            changed = hook(whole)
            return mark.part(whole if changed is None else changed)  # type: ignore[no-any-return]

        return function(tensor, hook if mark is None else of_whole)

    return guard


def _storage(function: Function) -> Function:
    """What safetensors asks of each tensor that it writes."""

    @wraps(function)
    def guard(tensor: Tensor) -> Any:
        refuse_in_file(tensor)
        return function(tensor)

    return guard


def _guarded() -> Iterator[tuple[Any, str, Any]]:
    """Owner and name of each function, and its guard. torch looks these names up at each call, so they guard
    a ``clip_grad_norm_`` or ``weight_norm`` that a program has imported before, too."""
    norms = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    for owner in (nn.utils, clip_grad):
        yield from ((owner, name, _norm(f)) for name, f in vars(owner).items() if f in norms)
    yield parametrize, "register_parametrization", _of_module("a parametrization", parametrize.register_parametrization)
    for kind in (WeightNorm, SpectralNorm):
        yield kind, "apply", staticmethod(_of_module("a norm of it", kind.apply))
    pruned = vars(prune.BasePruningMethod)["apply"].__func__
    yield prune.BasePruningMethod, "apply", classmethod(_of_module("a mask for it", pruned))
    for name, function in vars(nn.init).items():
        if not name.startswith("_") and callable(function) and name.rstrip("_") + "_" in vars(nn.init):
            yield nn.init, name, _initial(function)
    yield Tensor, "register_hook", _hooked(Tensor.register_hook)
    yield safetensors.torch, "storage_ptr", _storage(safetensors.torch.storage_ptr)


@contextmanager
def whole_tensors_only() -> Iterator[None]:
    """In the block, these functions take sharded parameters for what they are, on every rank."""
    with ExitStack() as undo:
        for owner, name, guard in list(_guarded()):
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, guard)
        yield
