"""A Parameter that refuses what torch would do with a part of it as with the whole."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

_GRAD: Any = Tensor.grad  # the descriptor, which the property below stands before


class CutParameter(nn.Parameter):
    """A Parameter of which other ranks hold other entries.

    ``torch.nn.utils.clip_grad_norm_`` takes the norm of this rank's part for that of the gradient. Each rank
    then scales by another number, and what all should have alike drifts apart without a word. Here it raises
    ValueError: it is known by who reads ``grad``, as the function is torch's own and no call of it on plain
    tensors tells where they come from. A read costs a third of a microsecond more.
    """

    @property
    def grad(self) -> Tensor | None:
        if not torch.compiler.is_compiling() and _reader() == "clip_grad_norm_":
            raise ValueError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's part of a gradient, "
                "each rank by another: call tpcore.clip_grad_norm(model, max_norm), or "
                "tpcore.optimizer_step(optimizer, max_norm=...)"
            )
        return super().grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


def _reader() -> str:
    """The function of torch's clipping that reads a gradient; empty for all others."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") != "torch.nn.utils.clip_grad":
        return ""
    if frame.f_code.co_name == "<listcomp>" and frame.f_back is not None:  # a frame of its own before 3.12
        frame = frame.f_back
    return frame.f_code.co_name
