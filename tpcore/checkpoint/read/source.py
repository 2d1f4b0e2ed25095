"""Reads the model in a checkpoint of any form, without a process group or a module, one shard at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ..forms.native import Native
from ..forms.rank_files import even_cut
from ..forms.registry import open_source
from ..forms.source import Cuts, Reading, Source, State
from ..tensors.stored import ReadPlan, Stored


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
    """Each tensor of the model, unsharded, by its first name; and for each further name of a tied tensor,
    its first name."""
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
