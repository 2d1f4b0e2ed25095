"""Checkpoints that can be loaded at any tp degree: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..runtime.consensus import gather, together
from ..runtime.context import current
from .forms.source import Reading
from .manifest import newest
from .read.load import Loading
from .read.source import StrPath, open_source
from .storage.files import naming
from .write.background import save_in_background, wait
from .write.save import Options, write_checkpoint

if TYPE_CHECKING:
    from .dtensor import dtensor_state_dict

__all__ = ["dtensor_state_dict", "latest", "load", "save", "wait"]


def save(
    state: dict[Any, Any],
    path: StrPath,
    *,
    background: bool = False,
    dtype: torch.dtype | None = None,
    keep_last: int | None = None,
    share_writes: bool = False,
    in_turn: bool = False,
) -> None:
    """Save this job's state as the directory ``path``, each tp rank's part in ``tp_rank_<i>``. Collective.

    Tied weights are written once. An earlier checkpoint of that name is replaced in one step, when the new one is
    complete.

    Args:
        state: a ``model.state_dict()``, or a dict of state_dicts and values that JSON can represent:
            ``{"model": ..., "optimizer": ..., "scheduler": ..., "rng": tpcore.random.get_state(), "epoch": 3}``. An
            optimizer in place of its ``state_dict()`` is sharded like its parameters; each dp rank writes a share of a
            ``Zero1``. The ``state_dict()`` of an optimizer can be loaded at another degree only if the optimizer was
            made from ``model.named_parameters()`` and the model is saved with it.
        path: the directory.
        background: return when the values are copied to host memory, and write in the background, one save at a time.
            An error on any rank is raised on every rank by the next ``save``, ``load`` or ``wait``, and logged at the
            end of the program. ``wait()`` returns when the save is complete.
        dtype: ``torch.bfloat16`` or ``torch.float16``: float32 is written in it, except tensors without dims.
        keep_last: when the new checkpoint is complete, keep the last so many of those beside it whose names differ only
            in the number at the end.
        share_writes: every dp rank writes a share of its tp rank's tensors, which dp rank 0 writes otherwise.
        in_turn: one rank writes after the other, which bounds host memory.

    Raises:
        ValueError: on every rank, for an entry that cannot be saved.
        CheckpointError: on every rank, for an error of the file system.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: at least the checkpoint that is being saved is kept")
    if background and in_turn:
        raise ValueError("background=True, in_turn=True: a save in the background keeps no order of ranks")
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype={dtype}: float32 is written as torch.bfloat16 or torch.float16")
    options = Options(background, in_turn, share_writes, dtype, keep_last)
    wait()
    (save_in_background if background else write_checkpoint)(state, path, options)


def load(
    path: StrPath,
    model: Any = None,
    *,
    model_key: str | None = "model",
    sharded: bool = True,
    strict: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    trust: bool = True,
) -> Any:
    """Load a checkpoint at any tp degree. Returns the saved dict without the entry loaded into ``model``. Collective.

    Each rank reads its own part. Names, shapes and dtypes are compared before the model is changed; floats are
    converted to the model's dtype. Directories of other libraries' forms can be loaded too, in all their layouts,
    sharded as the model is. They and files of ``torch.save`` are pickles, of which only tensors and plain values are
    read; a warning says that before torch 2.10 that restriction has a hole.

    Args:
        path: the directory, or a file.
        model: takes the entry ``model_key``, or the whole state if that is a model's state; on meta it gets memory on
            the context's device. It may be another object whose ``load_state_dict`` takes the entry. None: all entries
            of this rank are returned.
        model_key: the name of the model's entry.
        sharded: False: ``path`` is a ``.safetensors`` file, a file of ``torch.save`` (``{"model": ...}`` or flat) or a
            Hugging Face directory. Its names may have one prefix more or less than the model's.
        strict: False: skip missing and surplus names, and entries that cannot be loaded at this degree, with a warning.
        optimizer: takes the entry ``"optimizer"``, which is then not returned; a ``Zero1`` reads its own part alone. A
            torch optimizer loads its state at any degree from files of other libraries and from unsharded files too.
        trust: False: refuse pickles.

    Raises:
        CheckpointError: on every rank, with a list of what differs.
    """
    wait()
    ctx, path = current(), os.fspath(path)
    target, key, module = _targets(model, optimizer, model_key, sharded)
    if "tp" in ctx.mesh.axes:
        ctx.comm("tp")  # the first use of a group is collective, and here all ranks take part
    with ExitStack() as stack:
        with together(ctx), naming("load", path):
            source = open_source(path, Reading(model_key, trust, quiet=ctx.rank > 0), stack, sharded=sharded)
            loading = Loading(ctx, source, module, target, key, strict=strict, sharded=sharded)
            loading.compare()
        return loading.run()


def _targets(
    model: Any, optimizer: torch.optim.Optimizer | None, model_key: str | None, sharded: bool
) -> tuple[Any, Any, nn.Module | None]:
    """What takes an entry by its ``load_state_dict``, and the entry's key; and the model."""
    if isinstance(model, nn.Module):
        return optimizer, "optimizer", model
    if optimizer is not None:
        raise ValueError(
            "optimizer= goes with a model, load(path, model, optimizer=optimizer); alone it is "
            'load(path, optimizer, model_key="optimizer")'
        )
    if model is None and not sharded:
        raise ValueError("sharded=False needs a model: its layers say which part of a tensor is this rank's")
    if model is not None and not (
        hasattr(model, "load_state_dict") and (sharded or isinstance(model, torch.optim.Optimizer))
    ):
        raise ValueError(f"cannot load into a {type(model).__name__}" + ("" if sharded else " with sharded=False"))
    return model, model_key, None


def latest(directory: StrPath) -> str | None:
    """Path of the complete checkpoint in ``directory`` whose name ends in the highest number, of ``step_90`` and
    ``step_100`` the second; None if there is none yet. Waits for a save in the background. Collective over all ranks.
    CheckpointError where the directory cannot be read."""
    wait()
    ctx, last = current(), None
    with together(ctx):
        if ctx.rank == 0:
            last = newest(os.path.realpath(directory))
    path: str | None = gather(last, ctx.world)[0]
    return path


def __getattr__(name: str) -> Any:
    if name == "dtensor_state_dict":  # torch's DTensor takes half a second to import
        from .dtensor import dtensor_state_dict

        return dtensor_state_dict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
