"""A Trainer's checkpoint: the whole model in transformers' files, the optimizer's state in parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpcore import checkpoint
from tpcore.checkpoint.read.states import state_here
from tpcore.layers.sharding import sharding
from tpcore.log import inform
from tpcore.runtime.consensus import together
from tpcore.runtime.context import current
from tpcore.train.pipeline import PipelinedLayers
from tpcore.train.zero import fitted

from .load.gathered import drop_weights, full_state_dict, save_configuration
from .load.lazy import open_weights, read_parts
from .shard.refusals import is_guarded

PARTS = "tensor_parallel_shards"
"""The directory of a model that is saved in parts."""

STATE = "optimizer_shards"
"""The directory of the optimizer's and the scheduler's state inside a checkpoint."""

_SAVES = "save_pretrained"
"""In a sharded model's own dict: it is collective and writes all of it."""


def is_sharded(model: nn.Module) -> bool:
    """Whether ``parallelize`` has sharded ``model``, or it has layers of which ranks hold different parts."""
    marks = (sharding(p) for p in model.parameters())
    return is_guarded(model) or any(mark is not None and mark.axes for mark in marks)


@contextmanager
def saved(model: Any, save_weights: Callable[[], None]) -> Iterator[None]:
    """Inside, a sharded model's weights have been saved by all ranks: ``save_pretrained`` does nothing."""
    if _SAVES not in model.__dict__:
        yield
        return
    save_weights()
    save = model.__dict__[_SAVES]
    model.__dict__[_SAVES] = lambda *_, **__: None
    try:
        yield
    finally:
        model.__dict__[_SAVES] = save


def whole_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The full state of a sharded model of tpcore's layers; None for a model that saves itself."""
    if _SAVES in model.__dict__ or not is_sharded(model):
        return None
    if any(isinstance(m, PipelinedLayers) and m.pp.size > 1 for m in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} lies on several pipeline stages and is no model of transformers: "
            "save_strategy='no', and tpcore.checkpoint.save"
        )
    return full_state_dict(model)


def load_model(model: nn.Module, where: str) -> None:
    """Load this rank's part of the model at ``where``, stored whole or in parts. Collective."""
    checkpoint.wait()
    parts = os.path.join(where, PARTS)
    if os.path.isdir(parts):
        checkpoint.load(parts, model)
    elif _has_adapters(model, where):
        from .adapters.sharded import load_adapters

        with together(current()):
            load_adapters(model, where)
    else:
        with together(current()):
            weights = open_weights(model, where)
        read_parts(model, weights, current())


def _has_adapters(model: Any, where: str) -> bool:
    """Whether ``where`` has files of an adapter of ``model``: one of another name than "default" has a folder."""
    if type(model).__module__.partition(".")[0] != "peft":
        return False
    return any(os.path.isfile(os.path.join(where, f, "adapter_config.json")) for f in ("", *model.peft_config))


def save_in_parts(model: Any, where: str, *, in_background: bool = False) -> None:
    """The parts of a sharded model in ``tensor_parallel_shards``, the configuration beside it. Collective."""
    checkpoint.save({"model": model.state_dict()}, os.path.join(where, PARTS), background=in_background)
    with together(current()):
        if current().rank == 0:
            drop_weights(where)
            save_configuration(model, where)


def save_state(where: str, optimizer: Any, scheduler: Any, *, in_background: bool = False) -> None:
    """The optimizer in parts, which any mesh puts together. Collective."""
    plain = getattr(optimizer, "optimizer", optimizer)  # which accelerate has wrapped
    state = {"optimizer": plain, "scheduler": scheduler.state_dict()}
    checkpoint.save(state, os.path.join(where, STATE), background=in_background)


def load_state(where: str, optimizer: Any, scheduler: Any) -> None:
    """Load the files of ``save_state``, on any mesh, or of the stock Trainer; without either nothing. Collective."""
    parts, whole = os.path.join(where, STATE), os.path.join(where, "optimizer.pt")
    plain = getattr(optimizer, "optimizer", optimizer)
    if os.path.isdir(parts):
        rest = checkpoint.load(parts, plain, model_key="optimizer")
        scheduler.load_state_dict(rest["scheduler"])
    elif os.path.isfile(whole):
        with together(current()):
            state = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
            plain.load_state_dict(fitted(plain, state_here([state], plain, current(), whole)))
            steps = os.path.join(where, "scheduler.pt")
            scheduler.load_state_dict(torch.load(steps, map_location="cpu", weights_only=True))
    elif current().rank == 0:
        inform(f"{where} holds no optimizer's state: it starts anew")


def of_other_ranks(where: str) -> bool:
    """Whether the random numbers' state at ``where`` is that of another number of ranks."""
    files = {name for name in os.listdir(where) if name.startswith("rng_state")}
    size = current().mesh.size
    expected = {f"rng_state_{i}.pth" for i in range(size)} if size > 1 else {"rng_state.pth"}
    return bool(files) and files != expected
