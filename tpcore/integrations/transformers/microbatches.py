"""Batches of any size through a pipeline: the last one of an epoch may be smaller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...train.pipeline import PipelinedLayers


@dataclass(frozen=True)
class _Fit:
    """A hook that cuts a batch into as many microbatches as divide it, at most ``most``."""

    most: int

    def __call__(self, layers: PipelinedLayers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        layers.num_microbatches = math.gcd(len(hidden), self.most)


def fit_microbatches(model: nn.Module) -> None:
    """Let a batch that the number of microbatches does not divide go through in fewer."""
    for module in model.modules():
        if isinstance(module, PipelinedLayers) and not module._forward_pre_hooks:
            module.register_forward_pre_hook(_Fit(module.num_microbatches), with_kwargs=True)
