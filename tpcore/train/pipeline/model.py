"""PipelineModel: an engine that runs forward and backward of a model's training step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .alike import find_layers
from .arguments import check_count, microbatches
from .ends import Ends
from .layers import PipelinedLayers
from .lockstep import Lockstep
from .schedule import Schedule


class PipelineModel:
    """Trains ``model`` with the one-forward-one-backward schedule. It keeps the stage inputs of at most
    ``2 pp - 1`` microbatches, whatever their number; on lazy backends a program is one tick.

    ``model``: returns its loss, as a tensor, as ``.loss`` or first in a tuple, and calls ``PipelinedLayers``
    once in its forward. If it has none yet, they replace its only ``nn.ModuleList``. Use
    ``model.named_parameters()`` for the optimizer and ``model.state_dict()`` for checkpoints, as usual.

    A batch is cut along dim 0 into ``num_microbatches``: every tensor whose dim 0 has the size of the first tensor's,
    except arguments that ``shared`` names. ``loss``: the loss of the batch is the ``"mean"`` of the microbatches'
    losses, or their ``"sum"``, e.g. if the model divides by a given number of tokens. The model's forward runs up to
    its layers, and then a second time with the layers' output; both runs draw the same random numbers.

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
        """Run forward and backward of a batch; return its loss, detached and the same on every stage. Gradients of
        several runs accumulate. ``args`` and ``kwargs`` are the model's. Raises ValueError on all ranks for a batch
        that does not divide, or a model that no pipeline can run."""
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
        ends = Ends(self.model, layers, batches, seed, weight, self.scaler)
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
