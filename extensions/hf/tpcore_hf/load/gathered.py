"""Gathers a cut model: in memory, or into files that transformers can open."""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpcore import checkpoint
from tpcore.checkpoint.storage.files import make_dirs, naming, sync_dir
from tpcore.checkpoint.storage.tensorfile import order_of
from tpcore.layers.sharding import sharding
from tpcore.runtime.consensus import together
from tpcore.runtime.context import current
from tpcore_convert.rewrite import consolidate, divided, write_weights

from .names import Split, in_files

_STALE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


_DEFAULTS = {"push_to_hub": False, "variant": None, "token": None, "safe_serialization": True}
_DEFAULTS |= {"save_peft_format": True, "save_original_format": True, "distributed_checkpoint": False}
"""Options of transformers' ``save_pretrained`` that change nothing at these values."""


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of ``model.state_dict()``, whole, on the CPU of every rank; tied names share one tensor.

    It needs memory for the whole model; ``model.save_pretrained`` writes tensor by tensor instead. Collective
    over the ranks that have the parts.
    """
    state = model.state_dict(keep_vars=True)
    full = {id(t): whole(t) for t in {id(t): t for t in state.values()}.values()}
    return {name: full[id(t)] for name, t in state.items()}


def whole(tensor: Tensor) -> Tensor:
    """One parameter or buffer, whole, on the CPU. Collective over the ranks that have its parts."""
    mark, part = sharding(tensor), tensor.detach()
    return part.cpu().clone() if mark is None else mark.whole(part)


@dataclass(frozen=True)
class Gathered:
    """A tensor that is gathered when it is written, which adds its id to ``done``."""

    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    done: set[int]

    def pieces(self) -> Iterator[Tensor]:
        self.done.add(id(self.tensor))
        yield whole(self.tensor)


Written = Gathered | Split[Gathered]


def save_whole(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> None:
    """``model.save_pretrained`` of a cut model: the whole model, in transformers' own names and layout.

    Tensors are gathered one by one, but for those of stages, which are on disk twice meanwhile, beside the model that
    was there. Rank 0 writes them, in files of at most ``max_shard_size``, with an index if there are several.
    Collective over the world. Raises CheckpointError on every rank if a file cannot be written. A ``state_dict`` must
    be whole already: transformers writes it, on rank 0, and the other ranks need not call.
    """
    ctx = current()
    if state_dict is not None:
        if ctx.rank == 0:  # no collective: scripts call this on the rank that has the whole
            options |= {"state_dict": state_dict, "max_shard_size": max_shard_size}
            type(model).save_pretrained(model, save_directory, **options)
        return
    others = sorted(name for name, value in options.items() if name not in _DEFAULTS or value != _DEFAULTS[name])
    if others:
        raise ValueError(
            f"save_pretrained of a sharded model does not take {', '.join(f'{n}={options[n]!r}' for n in others)}: it "
            "writes safetensors into a directory, which from_pretrained opens whole"
        )
    out, done = os.path.realpath(save_directory), set[int]()
    if ctx.mesh.axes.get("pp", 1) > 1:
        _save_stages(model, out, bytes_of(max_shard_size))
        return
    with together(ctx):
        files = divided(_stored(model, done), bytes_of(max_shard_size))
    error: Exception | None = None
    if ctx.rank == 0:
        try:
            _write(model, out, files)
        except Exception as e:  # noqa: BLE001  raised below, when no rank waits for this one's parts
            error = e
    for group in files.values():
        for name in order_of(group):
            entry = group[name]
            tensor = (entry.source if isinstance(entry, Split) else entry).tensor
            if id(tensor) not in done:
                done.add(id(tensor))
                whole(tensor)
    with together(ctx):
        if error is not None:
            raise error


def _save_stages(model: Any, out: str, largest: int) -> None:
    """Each rank writes its part, and rank 0 makes one model of them."""
    ctx, parts = current(), os.path.join(out, ".stages")
    new = os.path.join(parts, "whole")  # until it is complete, what is there stays
    try:
        checkpoint.save(model.state_dict(), parts)
        with together(ctx):
            if ctx.rank == 0:
                names = [name for name in consolidate(parts, new, max_shard_size=largest) if _STALE.fullmatch(name)]
                with naming("put in place", out):
                    for name in names:
                        os.replace(os.path.join(new, name), os.path.join(out, name))
                    drop_weights(out, names)
                    save_configuration(model, out)
                sync_dir(out)
    finally:
        if ctx.rank == 0:
            shutil.rmtree(parts, ignore_errors=True)


def _stored(model: Any, done: set[int]) -> dict[str, Written]:
    """The tensors to write, by name in files: each once, under the name that its tied names refer to."""
    targets, ignored = set(getattr(model, "all_tied_weights_keys", {})), model._keys_to_ignore_on_save or ()
    state = model.state_dict(keep_vars=True)
    sources = {id(t) for name, t in state.items() if name not in targets}
    entries: dict[int, tuple[str, Gathered]] = {}
    for name, t in state.items():
        if name not in ignored and not (name in targets and id(t) in sources):
            shape = tuple(t.shape) if (mark := sharding(t)) is None else mark.layout.shape
            entries.setdefault(id(t), (name, Gathered(t, shape, t.dtype, done)))
    return in_files(model, dict(entries.values()))


def bytes_of(size: int | str) -> int:
    """A number of bytes, or of KB, MB, GB or TB, or of KiB, MiB, GiB or TiB."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", size.strip().upper())
    if match is None:
        raise ValueError(f"max_shard_size={size!r}: give bytes, or a size like '5GB'")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2])))


def _write(model: Any, out: str, files: Mapping[str, Mapping[str, Written]]) -> None:
    make_dirs(out)
    # inside of the directory: what is beside it may be another file system
    with naming("put in place", out), tempfile.TemporaryDirectory(prefix=".writing-", dir=out) as stage:
        names = write_weights(stage, files, {})
        for name in names:
            os.replace(os.path.join(stage, name), os.path.join(out, name))
        drop_weights(out, names)
        save_configuration(model, out)
    sync_dir(out)


def drop_weights(out: str, kept: Collection[str] = ()) -> None:
    """Remove the files of a model in the directory ``out``, but for those ``kept``."""
    for name in os.listdir(out):
        if name not in kept and _STALE.fullmatch(name):
            os.unlink(os.path.join(out, name))


def save_configuration(model: Any, out: str) -> None:
    """Write the configuration files, which ``from_pretrained`` reads with the weights."""
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
