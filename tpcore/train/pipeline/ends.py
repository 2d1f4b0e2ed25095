"""The parts of a model before and after its pipelined layers, and its loss."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import random
from .arguments import LayerArguments
from .layers import PipelinedLayers
from .recompute import Backward


class _AtLayers(Exception):
    """Raised to leave a model's forward at the call of its layers."""


class Ends:
    """The parts of ``model`` before and after its layers, for one microbatch at a time."""

    def __init__(
        self,
        model: nn.Module,
        layers: PipelinedLayers,
        batches: list[LayerArguments],
        seed: int | None,
        weight: float,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model, self._layers, self._batches = model, layers, batches
        self._seed, self._weight, self._scaler = seed, weight, scaler

    def _call(self, m: int) -> Any:
        """Call the model on a microbatch; every call draws the same random numbers."""
        batch, seed = self._batches[m], self._seed
        with nullcontext() if seed is None else random.seeded(random.mixed(seed, m)):
            return self._model(*batch.positional, **batch.named)

    def enter(self, microbatch: int) -> tuple[Tensor, LayerArguments]:
        """Run the model up to its layers, without gradients; return their input and other arguments."""
        seen: list[tuple[Tensor, LayerArguments]] = []

        def leave(x: Tensor, arguments: LayerArguments) -> Tensor:
            seen.append((x, arguments))
            raise _AtLayers

        with torch.no_grad(), self._layers.instead(leave):
            try:
                self._call(microbatch)
            except _AtLayers:
                return seen[0]
        raise ValueError(f"the forward of {type(self._model).__name__} does not call its pipelined layers")

    def leave(self, microbatch: int, hidden: Tensor) -> tuple[Tensor, Backward]:
        """The loss for the layers' output ``hidden``, and the backward of the part before the layers."""
        entered: list[Backward] = []

        def pass_on(x: Tensor, arguments: LayerArguments) -> Tensor:
            if names := arguments.requiring_grad():
                raise ValueError(
                    f"the layers get {names[0]}, which takes a gradient that this engine does not send back: "
                    "call the model itself, whose PipelinedLayers do, and loss.backward()"
                )
            entered.append(Backward(x))
            return hidden

        with self._layers.instead(pass_on):
            out = self._call(microbatch)
        if len(entered) != 1:
            raise ValueError(
                f"the forward of {type(self._model).__name__} calls its pipelined layers {len(entered)} "
                "times, and one microbatch goes through them once"
            )
        return loss_of(out, type(self._model).__name__) * self._weight, entered[0]

    def scaled(self, loss: Tensor) -> Tensor:
        """The multiple of a microbatch's loss that backward starts from; the same multiple on all ranks."""
        return loss if self._scaler is None else self._scaler.scale(loss)


def loss_of(out: Any, model: str) -> Tensor:
    """The loss in what a model returned. ValueError if there is none of one element."""
    found = getattr(out, "loss", None)
    if found is None and isinstance(out, tuple | list) and out:
        found = out[0]
    found = out if isinstance(out, Tensor) else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"{model} returned no loss of one element, but a {type(out).__name__}: give it labels, or return the loss"
        )
    return found.reshape(())
