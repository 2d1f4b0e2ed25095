"""Opens a checkpoint of any form, and reads its model without a process group or a module, one shard at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backend.registry import manager
from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ..forms import native, whole
from ..forms.pickles import parted
from ..forms.rank_files import even_spec
from ..forms.source import Form, Reading, Source, SpecOf, State
from ..manifest import newest
from ..storage.files import MANIFEST, PREFIX, listed, naming
from ..stored import ReadPlan, Stored
from .states import aligned, misfits


def forms() -> Iterator[Form]:
    """In the order in which they are tried: tpcore's own, those of extensions, unsharded models."""
    yield native.FORM
    for added in manager().hook.tpcore_checkpoint_forms():
        yield from added
    yield whole.FORM


def open_source(path: str, how: Reading, stack: ExitStack, *, sharded: bool | None = None) -> Source:
    """Open a checkpoint of any form, until ``stack`` closes. ``sharded``: only forms with this property."""
    for form in forms():
        if sharded in (None, form.sharded) and (source := form.open(path, how, stack)) is not None:
            return source
    raise CheckpointError(_unknown(path, sharded))


def _unknown(path: str, sharded: bool | None) -> str:
    if not os.path.exists(path):
        file = os.path.isfile(path.rstrip("/"))
        last = newest(os.path.dirname(path))
        beside = f", and {last} does: its name, or tpcore.checkpoint.latest" if last else ""
        return f"{path} is a file: leave out the slash at its end" if file else f"{path} does not exist{beside}"
    if not os.path.isdir(path):
        return f"{path} is a file: give sharded=False" if sharded else f"{path} is neither a file nor a directory"
    names = sorted(os.listdir(path))
    if sharded or (sharded is None and any(name.startswith(PREFIX) for name in names)):
        if (last := newest(path)) is not None:
            return f"{path} is no checkpoint, and holds some: load {last}, the newest (tpcore.checkpoint.latest)"
        contents = f"it holds {names[:3]}" if names else "it is empty"
        return f"{path} is no checkpoint: {os.path.join(path, MANIFEST)} is missing ({contents})"
    return f"{path} is a directory without model.safetensors or pytorch_model.bin, or an index of either"


StrPath = str | os.PathLike[str]


class ShardRule(NamedTuple):
    """Tensors whose names match ``pattern`` are sharded along ``dim``, in ``stride`` blocks of one size."""

    pattern: str
    dim: int
    stride: int = 1


def specs_by(rules: Sequence[ShardRule]) -> SpecOf:
    """The cut of a tensor by the first rule whose pattern matches its name."""

    def cut(name: str, shape: tuple[int, ...], tp: int) -> ShardSpec | None:
        for rule in rules:
            if fnmatchcase(name, rule.pattern):
                return even_spec(shape, tp, rule.dim, rule.stride)
        return None

    return cut


@contextmanager
def opened(path: StrPath, how: Reading, rules: Sequence[ShardRule] = ()) -> Iterator[Source]:
    """Open a checkpoint of any form. ValueError for ``rules`` if the form records its cuts itself."""
    with ExitStack() as stack:
        source = open_source(os.fspath(path), how, stack)
        if rules and isinstance(source, native.Native):
            raise ValueError(f"{source.path} records the cuts of its tensors: leave out the rules")
        yield source


def model_of(source: Source, spec_of: SpecOf, tp_rank: int | None = None) -> State:
    """The model of all pipeline stages. CheckpointError if two stages differ in a tensor."""
    model: State = {}
    for pp_rank in range(source.pp):
        for name, item in source.stage(pp_rank, tp_rank, spec_of).model().items():
            if name in model and isinstance(item, Stored) and not _same(model[name], item):
                raise CheckpointError(f"{source.path}: two pipeline stages hold {name!r} with different values")
            model.setdefault(name, item)
    return model


def tensors_of(source: Source, rules: Sequence[ShardRule] = ()) -> dict[str, Stored]:
    """The model's tensors. ``rules``: cuts that the checkpoint does not record."""
    model = model_of(source, specs_by(rules))
    return {name: item for name, item in model.items() if isinstance(item, Stored)}


def _same(a: Any, b: Stored) -> bool:
    if isinstance(a, Stored) and a.first.identity == b.first.identity:
        return True  # a tensor that is sharded over stages too: all stages return the same one
    return isinstance(a, Stored) and a.shape == b.shape and torch.equal(unsharded(a), unsharded(b))


def unsharded(stored: Stored) -> Tensor:
    """The tensor, in memory. Compares the checksum of each stored shard that it is read from."""
    plan = stored.plan()
    plan.verify(in_part=True)
    return plan.tensor()


def once(model: Mapping[str, Stored], path: str) -> tuple[dict[str, ReadPlan], dict[str, str]]:
    """Each tensor of the model, unsharded, by its first name; and for each further name its first name."""
    first: dict[object, str] = {}
    tensors: dict[str, ReadPlan] = {}
    ties: dict[str, str] = {}
    for name, stored in model.items():
        kept = first.setdefault((stored.first.identity, stored.layout), name)
        if kept == name:
            stored.known_layout()  # raises before anything is written
            tensors[name] = stored.plan()
        else:
            ties[name] = kept
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors of a model")
    return tensors, ties


def read_shards(
    source: StrPath | Mapping[str, Any],
    wanted: Mapping[str, tuple[ShardSpec, torch.dtype]],
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
    how, ties, mesh = how or Reading(), ties or {}, Mesh({"tp": n})
    layouts = {name: Layout.of(spec, "tp") for name, (spec, _) in wanted.items()}
    with ExitStack() as stack:
        if isinstance(source, Mapping):
            where, saved = "the state", whole.in_memory(parted(source, how, "the state")[0], "the state")
        else:
            where = os.fspath(source)
            with naming("load", where):
                form = open_source(where, how, stack)
                specs = {name: wanted[ties.get(name, name)][0] for name in (*wanted, *ties)}
                cut_by = {name: spec for name, spec in specs.items() if spec.dim is not None}
                saved = model_of(form, lambda name, shape, m: cut_by.get(name), rank if form.tp == n else None)
        saved = aligned(saved, {*wanted, *ties})
        for other, name in ties.items():
            if other in saved:
                saved.setdefault(name, saved[other])
        wrong = [
            text
            for name, (_, dtype) in wanted.items()
            for text in misfits(name, saved.get(name), layouts[name], dtype, mesh)
        ]
        surplus = [name for name in saved if name not in wanted and name not in ties]
        wrong += [f"{name!r}: the checkpoint has it, the model not" for name in surplus]
        if wrong:
            raise CheckpointError(listed(f"{where} does not fit the model", wrong))

        def read(stored: Stored, name: str) -> Tensor:
            return stored.plan(layouts[name], rank, mesh).tensor(wanted[name][1])

        tensors = {name: read(saved[name], name) for name in wanted}
        for other, name in ties.items():
            twice = other in saved and saved[other].first.identity != saved[name].first.identity
            if twice and not torch.equal(read(saved[other], name), tensors[name]):
                raise CheckpointError(f"{where}: {name!r} and {other!r} are one tensor in the model, but differ")
        return tensors
