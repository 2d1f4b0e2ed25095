"""Gathers a sharded model: in memory, or into files that transformers can open."""

from __future__ import annotations

import copy
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.checkpoint.storage.files import naming, sync_dir
from tpcore.checkpoint.storage.tensorfile import dtype_name, dtype_of, order_of
from tpcore.layers.sharding import sharding
from tpcore.runtime.consensus import gather, together
from tpcore.runtime.context import current
from tpcore_convert.rewrite import divided, replacement, write_weights

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


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """One parameter or buffer, whole, on the CPU, as ``dtype``. Collective over the ranks that have its parts."""
    mark, part = sharding(tensor), tensor.detach().to(dtype or tensor.dtype)
    return part.cpu().clone() if mark is None else mark.whole(part)


Merge = Callable[[], AbstractContextManager[None]]

NO_MERGES: Mapping[str, Merge] = {}


@dataclass(frozen=True)
class Gathered:
    """A tensor that is gathered when it is written, which adds its name to ``done``. ``stage``: the first that has it;
    ``tensor`` is None on stages without it. ``merged``: inside, its adapters are in
    it. ``everywhere``: all ranks have it then, and not rank 0 alone."""

    name: str
    tensor: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    done: set[str]
    merged: Merge = nullcontext
    everywhere: bool = False

    def pieces(self) -> Iterator[Tensor]:
        self.done.add(self.name)
        if self.tensor is None:
            full = torch.empty(self.shape, dtype=self.dtype)
        else:
            with self.merged():
                full = whole(self.tensor, self.dtype)
        ctx = current()
        if self.stage or (self.everywhere and ctx.mesh.axes.get("pp", 1) > 1):  # rank 0, which writes, is of the first
            full = ctx.comm("pp").broadcast(full.to(ctx.device), self.stage).cpu()
        yield full


Written = Gathered | Split[Gathered]


def save_whole(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> None:
    """``model.save_pretrained`` of a sharded model: the whole model, in transformers' own names and layout.

    Tensors are gathered one by one. Rank 0 writes them, in files of at most ``max_shard_size``, with an index if there
    are several, and then puts them in place. Collective over the world. Raises CheckpointError on every rank if a file
    cannot be written. A ``state_dict`` must be whole already: transformers writes it, on rank 0, and the other ranks
    need not call.
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
    out, done = os.path.realpath(save_directory), set[str]()
    entries = whole_entries(model, model.state_dict(keep_vars=True), done)
    with together(ctx):
        files = divided(in_files(model, entries), bytes_of(max_shard_size))
    error: Exception | None = None
    if ctx.rank == 0:
        try:
            _write(model, out, files)
        except Exception as e:  # noqa: BLE001  raised below, when no rank waits for this one's parts
            error = e
    for group in files.values():
        for name in order_of(group):
            entry = group[name]
            gathered = entry.source if isinstance(entry, Split) else entry
            if gathered.name not in done:
                deque(gathered.pieces(), maxlen=0)
    with together(ctx):
        if error is not None:
            raise error


def whole_entries(
    model: Any,
    state: Mapping[str, Tensor],
    done: set[str],
    dtype: torch.dtype | None = None,
    merges: Mapping[str, Merge] = NO_MERGES,
    everywhere: bool = False,
) -> dict[str, Gathered]:
    """The tensors of all stages, each once, under the name that its tied names refer to: floating ones as ``dtype``.
    ``state``: of this stage. Collective over stages."""
    targets, ignored = set(getattr(model, "all_tied_weights_keys", {})), not_saved(model)
    values = {name: (id(t), merges.get(name)) for name, t in state.items()}  # a tied name may be without adapters
    sources = {value for name, value in values.items() if name not in targets}
    names: dict[object, str] = {}
    for name, value in values.items():
        if name not in ignored and not (name in targets and value in sources):
            names.setdefault(value, name)
    here = {}
    for name in names.values():
        t, mark = state[name], sharding(state[name])
        kept = dtype if dtype and t.is_floating_point() else t.dtype
        here[name] = (t.shape if mark is None else mark.layout.shape, dtype_name(kept))
    ctx, entries = current(), dict[str, Gathered]()
    for stage, there in enumerate(gather(here, ctx.comm("pp")) if ctx.mesh.axes.get("pp", 1) > 1 else [here]):
        for name, (shape, of) in there.items():
            if name not in entries:
                here_too, merge = state.get(name), merges.get(name, nullcontext)
                entries[name] = Gathered(name, here_too, tuple(shape), dtype_of(of), stage, done, merge, everywhere)
    return entries


def not_saved(model: Any) -> Collection[str]:
    """The entries of the model's state that files do not have, beside those that are tied."""
    return getattr(model, "_keys_to_ignore_on_save", None) or ()


def bytes_of(size: int | str) -> int:
    """A number of bytes, or of KB, MB, GB or TB, or of KiB, MiB, GiB or TiB."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", size.strip().upper())
    if match is None:
        raise ValueError(f"max_shard_size={size!r}: give bytes, or a size like '5GB'")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2])))


def _write(model: Any, out: str, files: Mapping[str, Mapping[str, Written]]) -> None:
    with replacement(out) as folder:
        os.mkdir(folder)
        names = write_weights(folder, files, {})
        save_configuration(model, folder)
    with naming("put in place", out):
        drop_weights(out, names)
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
