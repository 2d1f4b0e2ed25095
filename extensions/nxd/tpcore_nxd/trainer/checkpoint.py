"""Saving and loading by directory and tag, as scripts of the trainer do it, over ``tpcore.checkpoint``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tpcore import checkpoint
from tpcore.checkpoint.storage.files import MANIFEST
from tpcore.errors import CheckpointError
from tpcore.runtime.consensus import gather
from tpcore.runtime.context import current
from tpcore.train.parameters import name_parameters

from .model import NxDOptimizer


def save_checkpoint(
    checkpoint_dir_str: str | os.PathLike[str],
    tag: str,
    model: nn.Module | dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | dict[str, Any] | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
) -> None:
    """Save what is given as the checkpoint ``checkpoint_dir_str/tag``. Collective over the world.

    ``model`` and ``optimizer``: themselves, or their ``state_dict()``; the optimizer itself opens at other degrees
    where the model is saved with it. ``user_content``: what JSON can say. ``num_kept_ckpts``: how many checkpoints
    stay whose tags differ in the number at the end only. ``async_save``: returns once values are copied. The other
    arguments choose among formats and numbers of writers, of which there is one: they change nothing.
    """
    state: dict[str, Any] = {"user_content": user_content}
    for name, stateful in (("model", model), ("scheduler", scheduler)):
        if stateful is not None:
            state[name] = stateful if isinstance(stateful, dict) else stateful.state_dict()
    if optimizer is not None:
        state["optimizer"] = _named(optimizer, model)
    where = os.path.join(os.fspath(checkpoint_dir_str), str(tag))
    keep = num_kept_ckpts if num_kept_ckpts is not None and num_kept_ckpts > 0 else None
    checkpoint.save(state, where, background=async_save, keep_last=keep)


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
) -> Any:
    """Load ``path/tag``, or the one that was saved last, on any mesh; returns its ``user_content``.

    Collective over the world. CheckpointError where there is none, or what is asked for is not in it.
    ``num_workers`` and ``use_zero1_dcp`` change nothing, as in ``save_checkpoint``.
    """
    checkpoint.wait()
    where = os.path.join(os.fspath(path), _newest(path) if tag is None else str(tag))
    target = None if optimizer is None else _named(optimizer, model)
    if model is None and target is not None:
        rest = checkpoint.load(where, target, model_key="optimizer")
    else:
        rest = checkpoint.load(where, getattr(model, "original_module", lambda: model)(), strict=strict)
        if target is not None:
            target.load_state_dict(_entry(rest, "optimizer", where))
    if scheduler is not None:
        saved = _entry(rest, "scheduler", where)
        scheduler.load_state_dict(saved)
    return rest.get("user_content")


def has_checkpoint(checkpoint_dir_str: str | os.PathLike[str]) -> bool:
    """Whether a complete checkpoint is in the directory, under any tag."""
    return bool(_tags(checkpoint_dir_str))


def finalize_checkpoint() -> None:
    """Return when a save in the background, if any, is complete; raise if it failed. Collective."""
    checkpoint.wait()


def _entry(saved: Any, name: str, where: str) -> Any:
    if name not in saved:
        raise CheckpointError(f"{where} was saved without {name}: it has {sorted(saved)} beside the model")
    return saved[name]


def _named(optimizer: Any, model: Any) -> Any:
    """The optimizer whose state it is. Its parameters get the names by which another degree finds their state."""
    inner = optimizer.optimizer if isinstance(optimizer, NxDOptimizer) else optimizer
    if isinstance(model, nn.Module) and isinstance(inner, torch.optim.Optimizer):
        name_parameters(inner, model, others=True)
    return inner


def _tags(folder: str | os.PathLike[str]) -> list[str]:
    """The tags of complete checkpoints. The one that was saved last is at the end."""
    times = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        manifest = os.path.join(os.fspath(folder), name, MANIFEST)
        if not name.startswith(".") and os.path.isfile(manifest):
            times[name] = os.stat(manifest).st_mtime_ns
    return sorted(times, key=lambda name: (times[name], name))


def _newest(folder: str | os.PathLike[str]) -> str:
    """The newest tag that rank 0 sees, on every rank."""
    tags: list[str] = gather(_tags(folder), current().world)[0]
    if not tags:
        raise CheckpointError(f"there is no complete checkpoint in {os.fspath(folder)}")
    return tags[-1]
