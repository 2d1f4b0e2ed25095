"""Optimizers, under the names that scripts use."""

from __future__ import annotations

from typing import TypeVar

import torch

from .train.zero import Zero1

__all__ = ["Zero1", "lazy"]

Chosen = TypeVar("Chosen", bound=torch.optim.Optimizer)


def lazy(optimizer_class: type[Chosen]) -> type[Chosen]:
    """``optimizer_class`` itself: an optimizer may be made before the model is cut or moved.

    For scripts that want a lazy constructor. ``tpcore.move_model_to_device`` and ``tpcore.parallelize``
    keep the Parameter objects, and most optimizers of torch make their state at the first step.
    Raises ValueError for a class that makes its state at once, as Adagrad does: make that optimizer
    afterwards, or wrap it in ``Zero1``, which waits for the first step.
    """
    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    if optimizer_class([probe], lr=1e-3).state:  # type: ignore[call-arg]
        raise ValueError(
            f"{optimizer_class.__name__} makes its state at once, of the shapes that parameters have then: "
            "make it once the model is cut and moved, or use tpcore.Zero1, which waits for the first step"
        )
    return optimizer_class
