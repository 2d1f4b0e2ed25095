"""A Parameter that refuses functions of torch that would take this rank's part for the whole."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

_GRAD: Any = Tensor.grad  # the descriptor, which the property below hides


class CutParameter(nn.Parameter):
    """A Parameter of which other ranks hold other entries.

    ``torch.nn.utils.clip_grad_norm_`` would take the norm of this rank's part for the norm of the gradient.
    Each rank would scale by another number, and replicated parameters would drift apart without an error.
    So reading ``grad`` raises ValueError if the caller is that function, which is found by its frame: it gets
    plain gradients, which do not say that they are parts. A read costs a third of a microsecond more.
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
