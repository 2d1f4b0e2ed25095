"""What lies at a path, in any form that can be read, without a process group or a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...shard import ShardSpec
from ...storage.jsonfile import MANIFEST, PREFIX
from ..format.cuts import Cut
from ..format.directory import Checkpoint, View
from ..format.stored import Stored
from ..format.tree import entries, is_dict, is_nested, is_tensor
from ..forms.pickled import Cuts, ForeignCheckpoint, even_cut, recognised, split
from ..forms.whole import Reading, State, open_unsharded


class CutRule(NamedTuple):
    """Tensors whose names match ``pattern`` are cut along ``dim``, in ``stride`` blocks of one size."""

    pattern: str
    dim: int
    stride: int = 1


@dataclass(frozen=True)
class Source:
    """``model`` by name; ``checkpoint`` or ``foreign`` where it is sharded.

    ``rest``: what lies beside the model in files of others, the same on all ranks; ``bound``: what does not,
    or is cut nobody knows how.
    """

    path: str
    form: str
    tp: int
    pp: int
    model: State
    checkpoint: Checkpoint | None = None
    foreign: ForeignCheckpoint | None = None
    rest: Mapping[Any, Any] = field(default_factory=dict)
    bound: Sequence[Any] = ()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, item in self.model.items():
            if isinstance(item, Stored):
                yield name, item


@contextmanager
def opened(path: str | os.PathLike[str], how: Reading, rules: Sequence[CutRule] = ()) -> Iterator[Source]:
    """Open a checkpoint of any form. ``rules`` say what is not on record about how tensors are cut."""
    with ExitStack() as stack:
        source = open_source(os.fspath(path), how, cuts_by(rules), stack)
        if rules and source.checkpoint is not None:
            raise ValueError(f"{source.path} says itself how its tensors are cut: leave out the rules for it")
        yield source


def open_source(path: str, how: Reading, cuts: Cuts, stack: ExitStack, rank: int = 0, n: int = 1) -> Source:
    """As rank ``rank`` of ``n`` sees it, which may have a shard of its own there. Closed with ``stack``."""
    there = recognised(path)
    if there is not None:
        own = rank if there.tp == n else None
        states, rests = zip(*(there.open(how, cuts, i, own) for i in range(len(there.stages))), strict=True)
        model, beside = _merged(states, path), split([rest for of_stage in rests for rest in of_stage])
        return Source(path, "pickled shards", there.tp, len(there.stages), model, None, there, *beside)
    folder = next((f for f in (path, os.path.join(path, "shards")) if _has_manifest(f)), None)
    if folder is None and os.path.exists(path) and not _has_ranks(path):
        form = "directory" if os.path.isdir(path) else "file"
        model, rest = open_unsharded(path, how, stack)
        for name, item in model.items():
            cut = cuts(name, item.shape, 1) if isinstance(item, Stored) else None
            if isinstance(cut, ShardSpec):
                model[name] = Stored(name, cut, 1, None, item.shard)
        return Source(path, f"unsharded {form}", 1, 1, model, None, None, *split([rest]))
    # what is not there under its name may lie beside it
    checkpoint = Checkpoint(folder or path, stack)
    pp = checkpoint.manifest.axis("pp")
    model = _merged([_model_of(View(checkpoint, rank, n, p), how) for p in range(pp)], path)
    return Source(checkpoint.path, "tpcore checkpoint", checkpoint.tp, pp, model, checkpoint=checkpoint)


def _has_manifest(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, MANIFEST))


def _has_ranks(path: str) -> bool:
    """Whether ranks have written here: then what is missing is the manifest."""
    return os.path.isdir(path) and any(name.startswith(PREFIX) for name in os.listdir(path))


def _model_of(view: View, how: Reading) -> State:
    nested = is_nested(view.entries, how.model_key, view.path, is_dict, is_tensor)
    items = entries(view.entries[how.model_key]) if nested else view.entries
    return {str(k): view.stored(v, str(k)) if is_tensor(v) else v for k, v in items.items()}


def _merged(states: Sequence[State], path: str) -> State:
    """The models of all pipeline stages as one."""
    model: State = {}
    for state in states:
        for name, item in state.items():
            if name in model and isinstance(item, Stored) and not _same(model[name], item):
                raise CheckpointError(f"{path}: two pipeline stages hold {name!r} with different values")
            model.setdefault(name, item)
    return model


def _same(a: Any, b: Stored) -> bool:
    return isinstance(a, Stored) and a.shape == b.shape and torch.equal(part(a, 0, 1), part(b, 0, 1))


def part(stored: Stored, rank: int, n: int) -> Tensor:
    """Shard ``rank`` of ``n``, in memory; the checksum of every shard that it is made from is compared."""
    out = torch.empty(stored.local_shape(None, n), dtype=stored.dtype)
    job = stored.job(out, None, rank, n)
    for shard in dict.fromkeys(shard for shard, region in job.parts if region.size != shard.shape):
        shard.verify()
    job.run()
    return out


def cuts_by(rules: Sequence[CutRule]) -> Cuts:
    """The first rule whose pattern matches a name says how that tensor is cut."""

    def cut(name: str, shape: tuple[int, ...], tp: int) -> Cut:
        for rule in rules:
            if fnmatchcase(name, rule.pattern):
                return even_cut(shape, tp, rule.dim, rule.stride)
        return None

    return cut
