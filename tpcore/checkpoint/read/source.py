"""Reads the model in a checkpoint of any form, without a process group or a module, one shard at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ..forms.native import Native
from ..forms.pickles import parted
from ..forms.rank_files import even_cut
from ..forms.registry import open_source
from ..forms.source import Cuts, Reading, Source, State
from ..forms.whole import in_memory
from ..storage.files import listed, naming
from ..tensors.stored import ReadPlan, Stored
from .fit import aligned, misfits


class CutRule(NamedTuple):
    """Tensors whose names match ``pattern`` are cut along ``dim``, in ``stride`` blocks of one size."""

    pattern: str
    dim: int
    stride: int = 1


def cuts_by(rules: Sequence[CutRule]) -> Cuts:
    """The cut of a tensor by the first rule whose pattern matches its name."""

    def cut(name: str, shape: tuple[int, ...], tp: int) -> ShardSpec | None:
        for rule in rules:
            if fnmatchcase(name, rule.pattern):
                return even_cut(shape, tp, rule.dim, rule.stride)
        return None

    return cut


@contextmanager
def opened(path: str | os.PathLike[str], how: Reading, rules: Sequence[CutRule] = ()) -> Iterator[Source]:
    """Open a checkpoint of any form. ValueError for ``rules`` if the form records its cuts itself."""
    with ExitStack() as stack:
        source = open_source(os.fspath(path), how, stack)
        if rules and isinstance(source, Native):
            raise ValueError(f"{source.path} records the cuts of its tensors: leave out the rules")
        yield source


def model_of(source: Source, cuts: Cuts, own: int | None = None) -> State:
    """The model of all pipeline stages. CheckpointError if two stages differ in a tensor."""
    model: State = {}
    for pp_rank in range(source.pp):
        for name, item in source.stage(pp_rank, own, cuts).model().items():
            if name in model and isinstance(item, Stored) and not _same(model[name], item):
                raise CheckpointError(f"{source.path}: two pipeline stages hold {name!r} with different values")
            model.setdefault(name, item)
    return model


def tensors_of(source: Source, rules: Sequence[CutRule] = ()) -> dict[str, Stored]:
    """The model's tensors. ``rules``: cuts that the checkpoint does not record."""
    model = model_of(source, cuts_by(rules))
    return {name: item for name, item in model.items() if isinstance(item, Stored)}


def _same(a: Any, b: Stored) -> bool:
    if isinstance(a, Stored) and a.first.identity == b.first.identity:
        return True  # a tensor that is cut over stages too: all stages return the same one
    return isinstance(a, Stored) and a.shape == b.shape and torch.equal(part(a, 0, 1), part(b, 0, 1))


def part(stored: Stored, rank: int, n: int) -> Tensor:
    """Shard ``rank`` of ``n``, in memory. Compares the checksum of each stored shard that it is read from."""
    plan = stored.plan(None, rank, Mesh({"tp": n}))
    plan.verify(in_part=True)
    return plan.tensor()


def once(model: Mapping[str, Stored], path: str) -> tuple[dict[str, ReadPlan], dict[str, str]]:
    """Each tensor of the model, unsharded, by its first name; and for each further name its first name."""
    first: dict[object, str] = {}
    tensors: dict[str, ReadPlan] = {}
    ties: dict[str, str] = {}
    for name, stored in model.items():
        kept = first.setdefault((stored.first.identity, stored.cut), name)
        if kept == name:
            stored.whole()  # raises before anything is written
            tensors[name] = stored.plan()
        else:
            ties[name] = kept
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors of a model")
    return tensors, ties


Wanted = Mapping[str, tuple[ShardSpec, torch.dtype]]


def read_shards(
    source: str | os.PathLike[str] | Mapping[str, Any],
    wanted: Wanted,
    rank: int,
    n: int,
    *,
    ties: Mapping[str, str] | None = None,
    how: Reading | None = None,
) -> dict[str, Tensor]:
    """Shard ``rank`` of ``n`` of each tensor in ``wanted``, contiguous and in its own memory, read without the others.

    ``source``: a checkpoint of any form and degree, or an unsharded model's state in memory (or a dict with it under
    ``how.model_key``). ``ties``: other names of tensors of ``wanted``. CheckpointError lists tensors that are missing,
    surplus or do not fit. Floats are converted to the wanted dtype.
    """
    how, ties = how or Reading(), ties or {}
    with ExitStack() as stack:
        if isinstance(source, Mapping):
            where, saved = "the state", in_memory(parted(source, how, "the state")[0], "the state")
        else:
            where = os.fspath(source)
            with naming("load", where):
                opened = open_source(where, how, stack)
                own = rank if opened.tp == n else None
                saved = model_of(opened, partial(_cut, wanted, ties), own)
        saved = aligned(saved, {*wanted, *ties})
        for other, name in ties.items():
            if other in saved:
                saved.setdefault(name, saved[other])
        wrong = [text for name, want in wanted.items() for text in _wrong(saved.get(name), name, want, n)]
        surplus = [name for name in saved if name not in wanted and name not in ties]
        wrong += [f"{name!r}: the checkpoint has it, the model not" for name in surplus]
        if wrong:
            raise CheckpointError(listed(f"{where} does not fit the model", wrong))
        tensors = {name: _read(saved[name], spec, dtype, rank, n) for name, (spec, dtype) in wanted.items()}
        for other, name in ties.items():
            twice = other in saved and saved[other].first.identity != saved[name].first.identity
            if twice and not torch.equal(_read(saved[other], *wanted[name], rank, n), tensors[name]):
                raise CheckpointError(f"{where}: {name!r} and {other!r} are one tensor in the model, but differ")
        return tensors


def _cut(wanted: Wanted, ties: Mapping[str, str], name: str, shape: tuple[int, ...], m: int) -> ShardSpec | None:
    """The cut of a tensor in a file that does not record it."""
    spec, _ = wanted.get(ties.get(name, name), (None, None))
    return None if spec is None or spec.dim is None else spec


def _wrong(stored: Any, name: str, want: tuple[ShardSpec, torch.dtype], n: int) -> list[str]:
    if not isinstance(stored, Stored):
        saved = "nothing" if stored is None else f"a {type(stored).__name__}"
        return [f"{name!r}: the model has shape {want[0].shape}, the checkpoint {saved}"]
    return list(misfits(name, stored, Layout.of(want[0], "tp"), want[1], Mesh({"tp": n})))


def _read(stored: Stored, spec: ShardSpec, dtype: torch.dtype, rank: int, n: int) -> Tensor:
    return stored.plan(Layout.of(spec, "tp"), rank, Mesh({"tp": n})).tensor(dtype)
