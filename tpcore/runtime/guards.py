"""Functions of torch that would take this rank's part of a tensor for the whole: refused in a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Function = Callable[..., Any]


def _is_part(t: object) -> bool:
    """Whether other ranks hold other entries of this parameter, by its mark."""
    return bool(getattr(getattr(t, "tpcore_sharding", None), "axes", ()))


def _clipping(function: Function) -> Function:
    @wraps(function)
    def guard(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(map(_is_part, parameters)):
            raise ValueError(
                "torch.nn.utils would clip by the norm of this rank's part of a gradient, each rank by "
                "another: call tpcore.clip_grad_norm(model, max_norm), or "
                "tpcore.optimizer_step(optimizer, max_norm=...)"
            )
        return function(parameters, *args, **kwargs)

    return guard


def _parametrization(function: Function) -> Function:
    @wraps(function)
    def guard(module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        weight = getattr(module, tensor_name, None)
        if isinstance(weight, Tensor) and _is_part(weight):
            raise ValueError(
                f"{type(module).__name__}.{tensor_name} is this rank's part, of shape {tuple(weight.shape)}, "
                "and a parametrization would take it for the whole weight: leave the layer unsharded, or "
                "remove the parametrization before the layer is converted"
            )
        return function(module, tensor_name, *args, **kwargs)

    return guard


def _guarded() -> Iterator[tuple[Any, str, Function]]:
    """Owner and name of each function, and its guard. torch looks these names up at each call, so they guard
    a ``clip_grad_norm_`` or ``weight_norm`` that a program has imported before, too."""
    # torch 2.5 has one function for both steps of clipping
    clip = getattr(clip_grad, "_clip_grads_with_norm_", clip_grad.clip_grad_norm_)
    for owner in (nn.utils, clip_grad):
        yield from ((owner, name, _clipping(clip)) for name, f in vars(owner).items() if f is clip)
    yield parametrize, "register_parametrization", _parametrization(parametrize.register_parametrization)
    for kind in (WeightNorm, SpectralNorm):
        yield kind, "apply", staticmethod(_parametrization(kind.apply))


@contextmanager
def whole_tensors_only() -> Iterator[None]:
    """In the block, these functions raise ValueError for sharded parameters, on every rank."""
    with ExitStack() as undo:
        for owner, name, guard in list(_guarded()):
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, guard)
        yield
