"""``save`` and ``load`` with every argument name under which they have been published."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from ..consensus import gather_bytes, together
from ..context import current
from .format.retention import newest
from .forms.source import Reading
from .read.model import StrPath, read_checkpoint
from .read.optimizer import load_object
from .write.background import finish_save, save_in_background
from .write.save import Options, write_checkpoint


def save(
    state_dict: dict[Any, Any] | None = None,
    save_dir: StrPath | None = None,
    save_serially: bool = False,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
    *,
    async_save: bool = False,
    keep_last: int | None = None,
    checkpoint: dict[Any, Any] | None = None,
    output_dir: StrPath | None = None,
) -> None:
    """Save this job's state as the directory ``save_dir``, each tp rank's part in ``tp_rank_<i>``.

    ``state_dict``: a ``model.state_dict()``, or a dict of such with anything that JSON can say beside them:
    ``{"model": ..., "optimizer": ..., "scheduler": ..., "rng": tpcore.random.get_state(), "epoch": 3}``.
    Tied weights are written once. An optimizer itself may stand for its ``state_dict()``: its parameters
    say how their state is cut, and the state of a ``Zero1`` is gathered one tensor at a time, each dp rank
    writing a share. The ``state_dict()`` of an optimizer can be loaded at another degree if the optimizer
    was made from ``model.named_parameters()`` and the model is saved with it.

    A checkpoint of that name is replaced when the new one is complete, in one step. Collective: call it on
    every rank; dp rank 0 writes. Raises ValueError for an entry that cannot be saved, CheckpointError
    where the disk says no, on every rank.

    ``save_serially``: one rank after the other (tensors are written one by one either way, so no rank
    needs memory for more than one). ``down_cast_bf16``: write float32 as bfloat16, except for tensors
    without dims. ``master_dp_only=False``: every dp rank writes a share of its tp rank's tensors.
    ``checkpoint`` and ``output_dir`` are other names of the first two.

    ``keep_last=N``: once the new one is complete, of the checkpoints beside it whose names differ in the
    number at the end only, those before the last N are removed.

    ``async_save``: returns when the values are copied to host memory, and writes in the background. One
    save is under way at a time. Its error, on any rank, is raised by the next ``save`` or ``load`` or by
    ``wait``, on every rank, and shown when the program ends. ``wait()`` returns when it is complete.
    """
    state = _one("state_dict", state_dict, "checkpoint", checkpoint)
    where = _one("save_dir", save_dir, "output_dir", output_dir)
    if save_xser:
        raise ValueError(
            "save_xser=True asks for a format of torch_xla; drop it: tensors are streamed anyhow"
        )
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: at least the checkpoint that is being saved is kept")
    if async_save and save_serially:
        raise ValueError("async_save and save_serially: a save in the background keeps no order of ranks")
    options = Options(save_serially, down_cast_bf16, not master_dp_only, async_save, keep_last)
    finish_save()
    (save_in_background if async_save else write_checkpoint)(state, where, options)


def load(
    load_dir: StrPath | None = None,
    model: nn.Module | None = None,
    model_key: str | None = "model",
    sharded: bool = True,
    strict: bool = True,
    *,
    trust: bool = True,
    chkpt_path: StrPath | None = None,
    model_or_optimizer: Any = None,
    load_xser: bool = False,
    master_dp_only: bool = True,
    weights_only: bool = True,
) -> Any:
    """Load a checkpoint, at any tp degree; returns the dict that was saved, without what went into ``model``.

    With ``model``: the entry ``model_key``, or all of it if it is a model's state itself, is loaded into it,
    each rank reading its own part. A model on meta gets memory on the context's device. Without: everything
    of this rank is returned. ``sharded=False``: from one ``.safetensors`` file, a file of ``torch.save``
    (``{"model": ...}`` or flat) or a Hugging Face directory, of which only this rank's part is read; the
    names there may have a prefix that the model's have not, or the other way round.

    Directories that NeuronX Distributed or optimum-neuron wrote are read too, in each of their layouts
    (that of ``load_xser=True`` by its files: the argument changes nothing); the model says how their tensors
    are cut. Those and files of
    ``torch.save`` are pickles, read without running what is in them; torch before 2.10 cannot promise that
    and warns. ``trust=False`` refuses them: ``tpcore checkpoint convert`` makes safetensors of them.

    Names, shapes and dtypes are compared before the model is touched: CheckpointError on every rank names
    what does not fit. Floats are converted to the model's dtype. ``strict=False`` leaves out, with a
    warning, what is missing or surplus, and entries that cannot be had at this degree.

    ``chkpt_path`` is another name of ``load_dir``. ``model_or_optimizer``: a model, or an object whose
    ``load_state_dict`` takes the entry ``model_key``. An optimizer of torch knows its parameters, so its
    state may be of any degree in files of others too, and of an unsharded file. Collective over all ranks.
    Nothing is ever unpickled but tensors and plain values.
    """
    where = _one("load_dir", load_dir, "chkpt_path", chkpt_path)
    if not master_dp_only:
        raise ValueError("master_dp_only=False is not supported: there is one copy for all dp ranks")
    if not weights_only:
        raise ValueError("weights_only=False would let a file run code; everything is loaded without")
    if model is not None and model_or_optimizer is not None:
        raise ValueError("model and model_or_optimizer are two names of one argument: give one")
    finish_save()
    target = model if model is not None else model_or_optimizer
    how = Reading(model_key, trust, quiet=current().rank > 0)
    if target is None or isinstance(target, nn.Module):
        return read_checkpoint(where, target, how, sharded=sharded, strict=strict)
    return load_object(where, target, how, sharded=sharded, strict=strict)


def latest(directory: StrPath) -> str | None:
    """Path of the last checkpoint in ``directory``, to go on from; None if there is none yet.

    That is the complete one whose name ends in the highest number: of ``step_90`` and ``step_100`` the
    second. What a killed job has left half-written never counts. Waits for a save in the background, if
    there is one. Rank 0 looks, and all ranks get its answer. Collective over all ranks. Raises
    CheckpointError where the directory cannot be read.
    """
    finish_save()
    ctx, found = current(), None
    with together(ctx):
        if ctx.rank == 0:
            found = newest(os.path.realpath(directory))
    path: str | None = json.loads(gather_bytes(json.dumps(found).encode(), ctx.world)[0])
    return path


def wait() -> None:
    """Return when the save in the background, if any, is complete; raise if it failed. Collective."""
    finish_save()


def _one(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The one of two spellings of an argument that was given."""
    if (value is None) == (other is None):
        given = "both" if value is not None else "neither"
        raise TypeError(f"{name} and {other_name} are two names of one argument: give one, not {given}")
    return value if value is not None else other
