"""The end of a training step."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ..context import current
from .clip import clip_grad_norm
from .data_parallel import reduce_gradients


@overload
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: None = None) -> None: ...
@overload
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float) -> Tensor: ...
@overload
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float | None) -> Tensor | None: ...
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> Tensor | None:
    """Mean of the gradients over dp, clipping if ``max_norm`` is given, the step, the backend's end of step.

    The same on every backend. Returns the gradient norm before clipping, or None without ``max_norm``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    reduce_gradients(parameters)
    norm = None if max_norm is None else clip_grad_norm(parameters, max_norm)
    optimizer.step()
    current().backend.mark_step()
    return norm
