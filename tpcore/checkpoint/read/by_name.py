"""Reads one rank's part of a model by name, without a module, a process group or other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ..forms.pickles import parted
from ..forms.registry import open_source
from ..forms.source import Reading
from ..forms.whole import in_memory
from ..storage.files import naming
from ..tensors.stored import Stored
from .fit import aligned, listed, misfits
from .source import model_of

Wanted = Mapping[str, tuple[ShardSpec, torch.dtype]]


def read_shards(
    source: str | os.PathLike[str] | Mapping[str, Any],
    wanted: Wanted,
    rank: int,
    n: int,
    *,
    ties: Mapping[str, str] | None = None,
    strict: bool = True,
    how: Reading | None = None,
) -> dict[str, Tensor]:
    """Shard ``rank`` of ``n`` of each tensor in ``wanted``, contiguous and in its own memory.

    ``source``: a checkpoint of any form and degree, or an unsharded model's state in memory (or a dict with it under
    ``how.model_key``). ``ties``: other names under which tensors of ``wanted`` may be stored. Only the bytes of this
    shard are read from files. Names, shapes and dtypes are compared first: CheckpointError lists tensors that are
    missing, do not fit or, if ``strict``, are surplus. Floats are converted to the wanted dtype.
    """
    how, ties = how or Reading(), ties or {}
    with ExitStack() as stack:
        if isinstance(source, Mapping):
            where, found = "the state", in_memory(parted(source, how, "the state")[0], "the state")
        else:
            where = os.fspath(source)
            with naming("load", where):
                opened = open_source(where, how, stack)
                own = rank if opened.tp == n else None
                found = model_of(opened, partial(_cut, wanted, ties), own)
        found = aligned(found, {*wanted, *ties})
        for other, name in ties.items():
            if other in found:
                found.setdefault(name, found[other])
        wrong = [text for name, want in wanted.items() for text in _wrong(found.get(name), name, want, n)]
        if strict:
            surplus = [name for name in found if name not in wanted and name not in ties]
            wrong += [f"{name!r}: the checkpoint has it, the model not" for name in surplus]
        if wrong:
            raise CheckpointError(listed(f"{where} does not fit the model", wrong))
        made = {name: _read(found[name], spec, dtype, rank, n) for name, (spec, dtype) in wanted.items()}
        for other, name in ties.items():
            twice = other in found and found[other].first.identity != found[name].first.identity
            if twice and not torch.equal(_read(found[other], *wanted[name], rank, n), made[name]):
                raise CheckpointError(f"{where}: {name!r} and {other!r} are one tensor in the model, but differ")
        return made


def _cut(wanted: Wanted, ties: Mapping[str, str], name: str, shape: tuple[int, ...], m: int) -> ShardSpec | None:
    """The cut of a tensor in a file that does not record it."""
    spec = wanted[ties.get(name, name)][0] if ties.get(name, name) in wanted else None
    return spec if spec is not None and spec.dim is not None else None


def _wrong(stored: Any, name: str, want: tuple[ShardSpec, torch.dtype], n: int) -> list[str]:
    if not isinstance(stored, Stored):
        held = "nothing" if stored is None else f"a {type(stored).__name__}"
        return [f"{name!r}: the model has shape {want[0].shape}, the checkpoint {held}"]
    return list(misfits(name, stored, Layout.of(want[0], "tp"), want[1], Mesh({"tp": n})))


def _read(stored: Stored, spec: ShardSpec, dtype: torch.dtype, rank: int, n: int) -> Tensor:
    return stored.plan(Layout.of(spec, "tp"), rank, Mesh({"tp": n})).tensor(dtype)
