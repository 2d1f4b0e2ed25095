"""Reading a checkpoint into a model, a model's state into memory, and the rest with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...consensus import gather_bytes, together
from ...context import ParallelContext, current
from ...errors import CheckpointError
from ...layers.sharding import shard_specs, stamp
from ...shard import ShardSpec
from ...storage.files import naming
from ..format.directory import Checkpoint, View
from ..format.stored import Job, Stored
from ..format.tree import decode, entries, is_dict, is_nested, is_tensor, only, spell
from ..forms.huggingface import aligned
from ..forms.pickled import ForeignCheckpoint, recognised, split, why_bound
from ..forms.whole import Reading, open_unsharded, own
from .fit import Fit

StrPath = str | os.PathLike[str]


class _Loading:
    """One call of load on one rank."""

    def __init__(self, ctx: ParallelContext, stack: ExitStack, *, strict: bool) -> None:
        self._ctx, self._stack, self._strict = ctx, stack, strict
        self._n, self._rank = ctx.mesh.axes.get("tp", 1), ctx.mesh.coords(ctx.rank).get("tp", 0)
        self._jobs: list[Job] = []
        self._made: dict[tuple[str, str], Tensor] = {}
        self._fit: Fit | None = None
        self.save_id = ""
        self.rest: Any = {}
        self.notes: list[str] = []

    # -- our directories ----------------------------------------------------------------------------------
    def open_sharded(self, load_dir: StrPath, model: nn.Module | None, model_key: str | None) -> None:
        pp_rank, pp = self._ctx.mesh.coords(self._ctx.rank).get("pp", 0), self._ctx.mesh.axes.get("pp", 1)
        checkpoint = Checkpoint(load_dir, self._stack)
        if checkpoint.manifest.axis("pp") != pp:
            raise CheckpointError(
                f"{checkpoint.path} was saved at pp={checkpoint.manifest.axis('pp')} and this job has pp={pp}"
            )
        self.save_id = checkpoint.manifest.save_id
        view = View(checkpoint, self._rank, self._n, pp_rank)
        rest = dict(view.entries)
        if model is not None:
            nested = is_nested(rest, model_key, checkpoint.path, is_dict, is_tensor)
            items = entries(rest.pop(model_key)) if nested else rest
            found = {name: self._found(item, str(name), view) for name, item in items.items()}
            self._fit = Fit(model, found, self._ctx, checkpoint.path, strict=self._strict)
            rest = rest if nested else {}
        for key in self._bound(view, rest):
            del rest[key]
        self.rest = decode(only(view.tree, rest), lambda leaf: self._tensor(leaf, view))

    def _found(self, item: Any, name: str, view: View) -> Any:
        if is_tensor(item):
            return view.stored(item, name)
        return decode(item, lambda leaf: self._tensor(leaf, view))

    def _bound(self, view: View, rest: dict[Any, Any]) -> Iterator[Any]:
        """The entries that cannot be had at this degree: an error, or left out with strict=False."""
        for key in list(rest):
            why = view.bound(key)
            if why is not None:
                if self._strict:
                    raise CheckpointError(f"{why}. strict=False leaves {spell((key,))} out")
                self.notes.append(f"left out: {why}")
                yield key

    def _tensor(self, leaf: dict[str, Any], view: View) -> Tensor:
        """Memory for a tensor, filled by ``read``; one for all the places where the same one was saved."""
        stored = view.stored(leaf, str(leaf.get("name")))
        place = str(leaf["file"]), str(leaf["name"])
        if place not in self._made:
            out = torch.empty(stored.local_shape(None, self._n), dtype=stored.dtype)
            self._jobs.append(stored.job(out, None, self._rank, self._n))
            if isinstance(stored.cut, ShardSpec) and self._n > 1:  # so that it is on record when saved again
                stamp(out, stored.cut, self._ctx.comm("tp"))
            self._made[place] = out
        return self._made[place]

    # -- what others wrote --------------------------------------------------------------------------------
    def open_unsharded(self, path: str, model: nn.Module, how: Reading) -> None:
        found, rest = open_unsharded(path, how, self._stack)
        self.rest = own(rest)
        found = aligned(found, set(model.state_dict(keep_vars=True)))
        self._fit = Fit(model, found, self._ctx, path, strict=self._strict)

    def open_foreign(self, there: ForeignCheckpoint, model: nn.Module | None, how: Reading) -> None:
        mine = self._rank if there.tp == self._n else None
        specs = {} if model is None else shard_specs(model)

        def cut(name: str, shape: tuple[int, ...], m: int) -> ShardSpec | None:
            spec = specs.get(name)
            return spec if spec is not None and spec.dim is not None else None

        found, rests = there.open(how, cut, there.stage_of(self._ctx), mine)
        kept, bound = split(rests) if mine is None else (rests[mine], [])
        if bound:
            why = why_bound(bound, there.path, there.tp)
            if self._strict:
                raise CheckpointError(f"{why}. strict=False leaves that out")
            self.notes.append(f"left out: {why}")
        self.rest = own(kept)
        if model is not None:
            self._fit = Fit(model, found, self._ctx, there.path, strict=self._strict)
        else:
            loaded = {name: self._whole(item) for name, item in found.items()}
            self.rest = {how.model_key: loaded, **self.rest}

    def _whole(self, stored: Any) -> Any:
        if not isinstance(stored, Stored):
            return own(stored)
        out = torch.empty(stored.local_shape(None, self._n), dtype=stored.dtype)
        self._jobs.append(stored.job(out, None, self._rank, self._n))
        return out

    # -- both ---------------------------------------------------------------------------------------------
    def verify(self) -> None:
        if self._fit is not None:
            self._fit.verify()

    def read(self) -> None:
        """First what the model does not see, so that as little as possible can fail once it changes."""
        for job in self._jobs:
            job.run()
        if self._fit is not None:
            self._fit.run()

    def finish(self) -> None:
        if self._fit is not None:
            self._fit.finish()
            self.notes += self._fit.notes
        if self._ctx.rank == 0:
            for note in self.notes:
                warnings.warn(note, stacklevel=4)


def read_checkpoint(
    load_dir: StrPath,
    model: nn.Module | None,
    model_key: str | None,
    *,
    sharded: bool,
    strict: bool,
    trust: bool = True,
) -> Any:
    """Load a checkpoint; see ``tpcore.checkpoint.load``. Collective over the world."""
    if not sharded and model is None:
        raise ValueError("sharded=False needs a model: its layers say which part of a tensor is this rank's")
    ctx = current()
    if "tp" in ctx.mesh.axes:
        ctx.comm("tp")  # now, where all ranks pass: the first use of a group is collective
    path = os.fspath(load_dir)
    with ExitStack() as stack:
        loading = _Loading(ctx, stack, strict=strict)
        with together(ctx), naming("load", path):
            how = Reading(model_key, trust, quiet=ctx.rank > 0)
            if model is not None and not sharded:
                loading.open_unsharded(path, model, how)
            elif (there := recognised(path)) is not None:
                loading.open_foreign(there, model, how)
            else:
                loading.open_sharded(path, model, model_key)
            loading.verify()
        seen = {data.decode() for data in gather_bytes(loading.save_id.encode(), ctx.world)}
        if len(seen) > 1:
            raise CheckpointError(f"{path} was replaced while it was opened: the ranks saw {sorted(seen)}")
        with together(ctx), naming("load", path):
            loading.read()
        with together(ctx):
            loading.finish()
        return loading.rest
