"""A model whose training step the pipeline runs, forward and backward."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import random
from .alike import find_layers
from .arguments import LayerArguments
from .layers import PipelinedLayers
from .lockstep import Ends, Lockstep
from .microbatches import check_count, microbatches
from .recompute import Backward
from .schedule import Schedule


class PipelineModel:
    """Trains ``model`` by one forward, one backward: memory for ``2 pp - 1`` microbatches' stage inputs,
    however many there are, and on lazy backends programs of a tick's size.

    ``model``: returns its loss, as a tensor, as ``.loss`` or first in a tuple, and calls ``PipelinedLayers``
    once in its forward. Where it has none yet, its one ``nn.ModuleList`` becomes them. It stays what it is:
    ``model.named_parameters()`` is for the optimizer, ``model.state_dict()`` for checkpoints.

    A batch is cut along dim 0 into ``num_microbatches``: every tensor whose dim 0 is that of the first one,
    but for arguments that ``shared`` names. ``loss``: whether that of the batch is the ``"mean"`` of the
    microbatches' losses, or their ``"sum"``, as where the model divides by a number of tokens that it is
    given. The model's forward is run up to its layers, and then once more with what they made; both draw the
    same random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        num_microbatches: int,
        *,
        loss: Literal["mean", "sum"] = "mean",
        shared: Collection[str] = (),
    ) -> None:
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss must be 'mean' or 'sum' of the microbatches' losses, not {loss!r}")
        self.model, self.num_microbatches = model, check_count(num_microbatches)
        self.loss, self.shared = loss, frozenset(shared)
        self.layers = pipelined_layers(model, num_microbatches)

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch; returns its loss, without gradient, the same on every stage.

        Gradients are added to those that there are: several runs accumulate. ``args`` and ``kwargs`` are the
        model's. ValueError on all ranks for a batch that does not divide, or a model that no pipeline can
        run.
        """
        return self._run(args, kwargs, train=True)

    def run_eval(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, as ``run_train`` computes it, without backward."""
        with torch.no_grad():
            return self._run(args, kwargs, train=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Tensor:
        layers, count = self.layers, self.num_microbatches
        batches = microbatches(args, kwargs, count, self.shared, copied=layers.cuts)
        end_tick = layers.end_program if layers.cuts else _nothing
        end_tick()  # the one program that knows how many microbatches there are
        seed = layers.seed()
        weight = 1 / count if self.loss == "mean" else 1.0
        ends = _Ends(self.model, layers, batches, seed, weight)
        schedule = Schedule(layers.pp.size, count)
        return Lockstep(layers.stage, ends, layers.pp, schedule, seed, train=train).run(end_tick)


def pipelined_layers(model: nn.Module, num_microbatches: int) -> PipelinedLayers:
    """Those of ``model``; where it has none, its one list of layers becomes them."""
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
    """Leaves a model's forward where its layers begin."""


class _Ends(Ends):
    def __init__(
        self,
        model: nn.Module,
        layers: PipelinedLayers,
        batches: list[LayerArguments],
        seed: int | None,
        weight: float,
    ) -> None:
        self._model, self._layers, self._batches = model, layers, batches
        self._seed, self._weight = seed, weight

    def _call(self, m: int) -> Any:
        """The model on a microbatch, which draws the same numbers whenever it is called."""
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


def _loss_of(out: Any, model: str) -> Tensor:
    found = getattr(out, "loss", None)
    if found is None and isinstance(out, tuple | list) and out:
        found = out[0]
    found = out if isinstance(out, Tensor) else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"{model} returned no loss of one element, but a {type(out).__name__}: give it labels, or "
            "return the loss"
        )
    return found.reshape(())
