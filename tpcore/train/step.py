"""The end of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..runtime.context import current
from ..runtime.elementwise import check_steps_parts
from .alike import check_whole_gradients
from .clip import check_max_norm, norm_of_gradients, scale_to
from .data_parallel import buckets_of, overlap_of, reduce_beside
from .parameters import check_not_replaced, unique_parameters
from .zero import Zero1

Scaler = GradScaler | None


class Stepping:
    """The gradients of an optimizer of torch between backward and its step: each dp rank steps all parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.scaled: Any = optimizer
        self._parameters = unique_parameters(p for group in optimizer.param_groups for p in group["params"])
        check_steps_parts(optimizer, self._parameters)

    def reduce_gradients(self) -> None:
        """Take the mean of the gradients over dp. Collective."""
        reduce_beside(self._parameters, overlap_of(self.scaled).take())
        if not self.gradients() and not self.scaled.state:  # before its first step
            check_not_replaced(self.scaled.param_groups)

    def gradients(self) -> list[Tensor]:
        """This rank's part of the mean gradients, to change in place."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def norm(self) -> Tensor:
        """The norm of the full gradient. Collective."""
        return norm_of_gradients(self._parameters, 2.0)

    def skip(self) -> None:
        """Take no step."""


def stepping_of(optimizer: Optimizer) -> Stepping | Zero1:
    """A Zero1 does all of it itself."""
    return optimizer if isinstance(optimizer, Zero1) else Stepping(optimizer)


def _finite_everywhere(tensors: list[Tensor]) -> bool:
    """Whether no rank of the world has an infinity or a NaN; the same on all ranks. Reads a value."""
    world = current().world
    # the largest entry, because the sum of squares overflows earlier
    values = (t.coalesce().values() if t.is_sparse else t for t in tensors)
    largest = [torch.linalg.vector_norm(t, float("inf")).isfinite() for t in values if t.numel()]
    device = world.position.device
    finite = torch.stack(largest).all() if largest else torch.ones((), dtype=torch.bool, device=device)
    nonfinite = (~finite).to(torch.int64).reshape(1)
    return not bool(world.all_reduce(nonfinite, "max").item())


def _unscale(gradients: list[Tensor], scaled: Any, scaler: GradScaler) -> bool:
    """Unscale the gradients; False on all ranks if one of them has an infinity: then every rank's gradients become
    NaN, so that each rank's scaler skips the step by itself. ``scaled``: what it takes for the optimizer."""
    finite = _finite_everywhere(gradients)
    for gradient in gradients if not finite else ():
        gradient.mul_(float("nan"))
    scaler.unscale_(scaled)
    return finite


@contextmanager
def overlap_grad_reduce(optimizer: Optimizer) -> Iterator[None]:
    """Start the mean of gradients over dp while backward still runs: call the last backward before a step in it.

    Each bucket starts when its gradients are accumulated, in one order on all ranks, and ``optimizer_step`` waits. The
    numbers are those without the block, bit for bit if every parameter gets a gradient: one that has changed since its
    bucket started, except through ``.data``, is reduced again. The first block starts buckets at its end, and learns
    when each gradient is complete. Buckets under way take the memory of a second copy of the gradients.

    On a lazy backend, where a step is one program, it does nothing. Collective over dp, ep and cp. A backward that
    itself makes collectives over dp must make them alike on all ranks.
    """
    if not current().data.eager:
        yield
        return
    of_torch = [p for group in optimizer.param_groups for p in group["params"]]
    buckets = optimizer.buckets() if isinstance(optimizer, Zero1) else buckets_of(unique_parameters(of_torch))
    with overlap_of(optimizer).block(buckets):
        yield


@overload
def optimizer_step(
    optimizer: Optimizer, *, max_norm: None = None, skip_nonfinite: Literal[False] = False, scaler: Scaler = None
) -> None: ...
@overload
def optimizer_step(
    optimizer: Optimizer, *, max_norm: float, skip_nonfinite: bool = False, scaler: Scaler = None
) -> Tensor: ...
@overload
def optimizer_step(
    optimizer: Optimizer, *, max_norm: float | None = None, skip_nonfinite: Literal[True], scaler: Scaler = None
) -> Tensor: ...
@overload
def optimizer_step(
    optimizer: Optimizer, *, max_norm: float | None = None, skip_nonfinite: bool = False, scaler: Scaler = None
) -> Tensor | None: ...
@torch.no_grad()
def optimizer_step(
    optimizer: Optimizer, *, max_norm: float | None = None, skip_nonfinite: bool = False, scaler: Scaler = None
) -> Tensor | None:
    """Take the mean of the gradients over dp, clip them to ``max_norm``, step, and end the backend's step.

    It works on every backend, for optimizers of torch and for ``Zero1``. With ``max_norm`` or ``skip_nonfinite`` it
    returns the norm of the full gradient before clipping, else None.

    ``skip_nonfinite``: if the norm is not finite on some rank, no rank takes the step and the returned norm is
    infinite. ``scaler``: a ``torch.amp.GradScaler``; call backward on its ``scale(loss)`` before, and its ``update()``
    afterwards. Gradients are unscaled before clipping, and if one rank has an infinity all ranks skip the step, so
    that their scales stay equal. Both options read a value, which ends a program on a lazy backend. Collective over
    the world. Raises ValueError for parameters of another context, for parameters that torch's own parallelism has
    cut, in the first steps for whole parameters whose gradients differ between tp ranks, and for an optimizer that
    mixes a parameter's entries (Adafactor, Muon, LAMB) where each rank has a part.
    """
    if max_norm is not None:
        check_max_norm(max_norm)
    ctx = current()
    tp = ctx.comm(*ctx.mesh.present(("tp",)))
    if ctx.observer is not None:
        ctx.observer.compare(tp)
    check_whole_gradients(optimizer, tp)
    scaling = scaler if scaler is not None and scaler.is_enabled() else None
    stepping = stepping_of(optimizer)
    stepping.reduce_gradients()
    scaled: Any = None if scaling is None else stepping.scaled  # one object: the scaler knows it by its id
    finite = scaling is None or _unscale(stepping.gradients(), scaled, scaling)
    norm = stepping.norm() if max_norm is not None or skip_nonfinite else None
    if norm is not None and skip_nonfinite:
        finite = _finite_everywhere([norm]) and finite
    if norm is not None and not finite:
        # also if this rank's norm is finite: another rank's is not, though they should be equal
        norm = torch.full_like(norm, float("inf"))
    if isinstance(optimizer, Zero1):
        optimizer.grad_norm = norm
    if not finite:
        stepping.skip()
    else:
        if norm is not None and max_norm is not None:
            scale_to(stepping.gradients(), norm, max_norm)
        if scaling is None:
            optimizer.step()
        else:
            scaling.step(scaled)
    ctx.backend.mark_step()
    return norm
