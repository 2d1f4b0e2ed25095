"""PipelineModel: an engine that runs forward and backward of a model's training step."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...runtime import random
from .alike import find_layers
from .arguments import LayerArguments
from .layers import PipelinedLayers
from .lockstep import Ends, Lockstep
from .microbatches import check_count, microbatches
from .recompute import Backward
from .schedule import Schedule


class PipelineModel:
    """Trains ``model`` with the one-forward-one-backward schedule. It keeps the stage inputs of at most
    ``2 pp - 1`` microbatches, whatever their number; on lazy backends a program is one tick.

    ``model``: returns its loss, as a tensor, as ``.loss`` or first in a tuple, and calls ``PipelinedLayers``
    once in its forward. If it has none yet, they replace its only ``nn.ModuleList``. Use
    ``model.named_parameters()`` for the optimizer and ``model.state_dict()`` for checkpoints, as usual.

    A batch is cut along dim 0 into ``num_microbatches``: every tensor whose dim 0 has the size of the first
    tensor's, except arguments that ``shared`` names. ``loss``: the loss of the batch is the ``"mean"`` of the
    microbatches' losses, or their ``"sum"``, e.g. if the model divides by a given number of tokens. The
    model's forward runs up to its layers, and then a second time with the layers' output; both runs draw the
    same random numbers.

    ``scaler``: scales each microbatch's loss before backward, but not the returned loss. Pass it
    to ``tpcore.optimizer_step`` too, and call its ``update`` afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        num_microbatches: int,
        *,
        loss: Literal["mean", "sum"] = "mean",
        shared: Collection[str] = (),
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss must be 'mean' or 'sum' of the microbatches' losses, not {loss!r}")
        self.model, self.num_microbatches = model, check_count(num_microbatches)
        self.loss, self.shared, self.scaler = loss, frozenset(shared), scaler
        self.layers = pipelined_layers(model, num_microbatches)

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch; return its loss, detached and the same on every stage.

        Gradients of several runs accumulate. ``args`` and ``kwargs`` are the model's. Raises ValueError on
        all ranks for a batch that does not divide, or a model that no pipeline can run.
        """
        return self._run(args, kwargs, train=True)

    def run_eval(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch as in ``run_train``, without backward."""
        with torch.no_grad():
            return self._run(args, kwargs, train=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Tensor:
        layers, count = self.layers, self.num_microbatches
        given = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
        layers.compare({name: t for name, t in given.items() if isinstance(t, Tensor)}, "batch")
        batches = microbatches(args, kwargs, count, self.shared, copied=layers.cuts)
        end_tick = layers.end_program if layers.cuts else _nothing
        end_tick()  # ends the only program that depends on the number of microbatches
        seed = layers.seed()
        weight = 1 / count if self.loss == "mean" else 1.0
        ends = _Ends(self.model, layers, batches, seed, weight, self.scaler)
        schedule = Schedule(layers.pp.size, count)
        return Lockstep(layers.stage, ends, layers.pp, schedule, seed, train=train).run(end_tick)


def pipelined_layers(model: nn.Module, num_microbatches: int) -> PipelinedLayers:
    """The PipelinedLayers of ``model``. If it has none, they replace its only list of layers."""
    found = [m for m in model.modules() if isinstance(m, PipelinedLayers)]
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} has {len(found)} PipelinedLayers; one engine runs one")
    if not found:
        owner, name = find_layers(model)
        found = [PipelinedLayers(owner.get_submodule(name).children(), num_microbatches)]
        setattr(owner, name, found[0])
    return found[0]


def _nothing() -> None:
    pass


class _AtLayers(Exception):
    """Raised to leave a model's forward at the call of its layers."""


class _Ends(Ends):
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
        return _loss_of(out, type(self._model).__name__) * self._weight, entered[0]

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)


def _loss_of(out: Any, model: str) -> Tensor:
    found = getattr(out, "loss", None)
    if found is None and isinstance(out, tuple | list) and out:
        found = out[0]
    found = out if isinstance(out, Tensor) else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"{model} returned no loss of one element, but a {type(out).__name__}: give it labels, or return the loss"
        )
    return found.reshape(())
