"""Optimizers under the names by which scripts ask for them."""

from __future__ import annotations

from typing import TypeVar

import torch

from .train.zero import Zero1

__all__ = ["Zero1", "lazy"]

Chosen = TypeVar("Chosen", bound=torch.optim.Optimizer)


def lazy(optimizer_class: type[Chosen]) -> type[Chosen]:
    """``optimizer_class`` itself: an optimizer may be made before the model is cut or moved.

    For scripts that ask for a lazy constructor. ``tpcore.move_model_to_device`` and whatever cuts a model
    in place keep every Parameter the object it is, and optimizers of torch make their state at the first
    step. One that makes it at once, as Adagrad does, is refused with a ValueError: make it afterwards, or
    wrap it in ``Zero1``, which waits.
    """
    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    if optimizer_class([probe], lr=1e-3).state:  # type: ignore[call-arg]
        raise ValueError(
            f"{optimizer_class.__name__} makes its state at once, of the shapes that parameters have then: "
            "make it once the model is cut and moved, or use tpcore.Zero1, which waits for the first step"
        )
    return optimizer_class
