"""tpcore's own form: a directory with a manifest and the cut of each tensor."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ..manifest import STATE, Manifest, check_format, rank_dir
from ..storage.files import MALFORMED, MANIFEST, PREFIX, crc32_text, damage, loads, naming, read_file
from ..storage.publish import resolve
from ..storage.tensorfile import FileTensor, TensorFile, dtype_of
from ..stored import LayoutOnRecord, Stored, over_tp
from ..tree import Leaf, Path, decode, dotted, filled, is_nested, is_optimizer, leaves, merged, parameter_names
from .source import Fill, Form, OfParameter, Reading, Source, SpecOf, Stage, State


class Native(Source):
    """A directory with a valid manifest. Files are opened at first use and closed with ``stack``."""

    form = "tpcore checkpoint"
    restages = True

    def __init__(self, path: str, how: Reading, stack: ExitStack) -> None:
        self.path, self.model_key, self.stack = os.path.realpath(path), how.model_key, stack
        manifest = os.path.join(self.path, MANIFEST)
        with naming("list", self.path):
            names = os.listdir(self.path)
        self.manifest = Manifest.from_json(read_file(manifest), manifest)
        here, listed = {name for name in names if name.startswith(PREFIX)}, set(self.manifest.rank_dirs)
        for surplus in sorted(here - listed):
            raise CheckpointError(f"{os.path.join(self.path, surplus)} is of no rank that {manifest} lists")
        for missing in sorted(listed - here):
            raise CheckpointError(f"{os.path.join(self.path, missing)} is missing")
        (self.tp, self.pp), self.save_id = self.manifest.degrees, self.manifest.save_id
        self.over_tp, self.over_stages = over_tp(self.tp), Mesh({"pp": self.pp, "tp": self.tp})
        self.rank = cache(partial(RankState, self))

    def file(self, name: str) -> str:
        """Path of a file. CheckpointError if the manifest does not list it, or lists another size."""
        path = os.path.join(self.path, *name.split("/"))
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{path} is not listed in {os.path.join(self.path, MANIFEST)}")
        if os.path.realpath(path) != path:
            raise CheckpointError(f"{path} is a link: a checkpoint's files lie in its directory")
        with naming("open", path):
            size = os.stat(path).st_size
        if size != record.size:
            raise CheckpointError(f"{path} has {size} bytes, not {record.size} as written: truncated or replaced")
        return path

    def stage(self, pp_rank: int, tp_rank: int | None, spec_of: SpecOf) -> NativeStage:
        return NativeStage(self, pp_rank, tp_rank)

    def entries_of_all(self, spec_of: SpecOf, names: Sequence[str] | None = None) -> NativeStage:
        return NativeStage(self, None, None, names)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """All for whoever lists a file: those of other entries than the model too."""
        for pp_rank in range(self.pp):
            stage = NativeStage(self, pp_rank, 0 if self.tp == 1 else None)
            for key in stage.state:
                yield from ((dotted(path), stored) for path, stored in _tensors(stage.entry(key), (key,)))


class RankState:
    """One rank's directory: its encoded state and its tensors."""

    def __init__(self, checkpoint: Native, tp_rank: int, pp_rank: int) -> None:
        self._checkpoint, self._name = checkpoint, rank_dir(tp_rank, pp_rank, checkpoint.pp)
        name = self._name
        self.path = checkpoint.file(f"{name}/{STATE}")
        self._files: dict[str, TensorFile] = {}
        self._known: dict[Leaf, tuple[FileTensor, LayoutOnRecord]] = {}
        data = read_file(self.path)
        if checkpoint.manifest.files[f"{name}/{STATE}"].crc32 != crc32_text(zlib.crc32(data)):
            raise CheckpointError(f"{self.path} is damaged, or of another save: {MANIFEST} has another checksum")
        top = loads(data, self.path, halves=True)
        check_format(top, self.path)
        self._check_save(top.get("save_id"), top.get("rank"), self.path)
        with damage(self.path):
            tree, self._records = top["state"], top["tensors"]
        try:  # here, where the file is known
            self.state = decode(tree)
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}") from e
        if not isinstance(self.state, dict):
            raise CheckpointError(f"{self.path}: a dict is missing where a checkpoint has one")

    def _check_save(self, save_id: Any, rank: Any, path: str) -> None:
        if save_id != self._checkpoint.manifest.save_id:
            raise CheckpointError(f"{path} is of another save than {MANIFEST}: {save_id}")
        if rank != self._name:
            raise CheckpointError(f"{path} is of the directory {rank}")

    def tensor(self, leaf: Leaf) -> tuple[FileTensor, LayoutOnRecord]:
        """A tensor that the state lists, and its layout. Its file is opened at first use."""
        if leaf in self._known:
            return self._known[leaf]
        file, name = leaf.file, leaf.name
        try:
            record = self._records[file].get(name)
            if record is None:
                raise CheckpointError(f"{self.path} has no tensor {name!r} of {file}")
            dtype, shape, crc32 = dtype_of(record["dtype"]), tuple(map(int, record["shape"])), str(record["crc32"])
            layout: LayoutOnRecord = record["spec"]
            if isinstance(layout, dict):
                layout = Layout.of(ShardSpec.from_json(layout), *record["axes"])
        except MALFORMED as e:
            what = f"{self.path}: the record of {name!r} in {file}"
            raise CheckpointError(f"{what} is damaged: {type(e).__name__}: {e}") from e
        if file not in self._files:
            opened = TensorFile(self._checkpoint.file(f"{self._name}/{file}"))
            self._checkpoint.stack.callback(opened.close)
            self._check_save(opened.metadata.get("save_id"), opened.metadata.get("rank"), opened.path)
            self._files[file] = opened
        self._known[leaf] = self._files[file].recorded(name, dtype, shape, crc32), layout
        return self._known[leaf]


class NativeStage(Stage):
    """One stage. At another degree, the first rank's entries represent those of all ranks, and of all stages if
    ``pp_rank`` is None. ``state``: the decoded state, with a Leaf for each tensor."""

    def __init__(
        self, checkpoint: Native, pp_rank: int | None, tp_rank: int | None, names: Sequence[str] | None = None
    ) -> None:
        self._checkpoint, self._pp_rank, self._tp_rank = checkpoint, pp_rank or 0, tp_rank
        self._alike: Sequence[int] = range(checkpoint.pp) if pp_rank is None else (pp_rank,)
        self.state = checkpoint.rank(tp_rank or 0, pp_rank or 0).state
        self._stored: dict[tuple[int, Leaf], Stored] = {}  # one object per stored tensor, also if tied
        self._entries: dict[Any, Any] = {}
        self._merged: set[Any] = set()  # keys of optimizers, whose states of all stages are put together
        for key in self.state if pp_rank is None else ():
            if all(is_optimizer(checkpoint.rank(0, stage).state.get(key)) for stage in self._alike):
                one = merged([self._of_stage(key, stage) for stage in self._alike], names)
                if one is not None:
                    self._entries[key] = one
                    self._merged.add(key)

    def entry(self, key: Any) -> Any:
        """The top-level entry ``key``, with a Stored for each tensor."""
        if key not in self._entries:
            self._entries[key] = filled(self.state[key], Leaf, self.stored, (key,))
        return self._entries[key]

    def _of_stage(self, key: Any, stage: int) -> Any:
        value = self._checkpoint.rank(self._tp_rank or 0, stage).state[key]
        return filled(value, Leaf, partial(self.stored, stage=stage), (key,))

    @cached_property
    def _nested(self) -> bool:
        return is_nested(self.state, self._checkpoint.model_key, self._checkpoint.path)

    def model(self, fill: Fill | None = None) -> State:
        top = self.entry(self._checkpoint.model_key) if self._nested else {key: self.entry(key) for key in self.state}
        return {
            str(name): item if fill is None or isinstance(item, Stored) else _filled(item, fill)
            for name, item in top.items()
        }

    def _keys(self, model: bool) -> list[Any]:
        if model:
            return list(self.state)
        return [key for key in self.state if key != self._checkpoint.model_key] if self._nested else []

    def entries(self, fill: Fill, without: Collection[Any] = (), *, model: bool = False) -> Any:
        top = copy(self.state)  # of its type
        top.clear()
        top.update({key: self.entry(key) for key in self._keys(model) if key not in without})
        return _filled(top, fill)

    def bound(self, *, model: bool = False) -> Mapping[Any, str]:
        if self._tp_rank is not None:
            return {}
        reasons = {key: next(self._reasons(key), None) for key in self._keys(model)}
        return {key: why for key, why in reasons.items() if why is not None}

    def _reasons(self, key: Any) -> Iterator[str]:
        """Why an entry can be loaded only at the degree of the save: ranks differ in a value, stages in a tensor, or
        how a tensor is cut is not on record."""
        tp, several = self._checkpoint.tp, len(self._alike) > 1
        degree = f"tp={tp}, pp={self._checkpoint.pp}" if several else f"tp={tp}"
        only = f"can be loaded only at the degree it was saved at, {degree}:"
        for stage, i in product(self._alike, range(tp)):
            entry = self._checkpoint.rank(0, stage).state[key] if key in self._merged else self.state[key]
            of_rank = self._checkpoint.rank(i, stage).state.get(key)
            a, b = (dict(leaves(value, (key,))) if of_rank != entry else {} for value in (entry, of_rank))
            for path in a | b:
                if repr(a.get(path, ...)) != repr(b.get(path, ...)):  # a nan is itself
                    other = f"{i} of stage {stage}" if several else f"{i}"
                    yield f"{dotted(path)} {only} it is {a.get(path)!r} of tp rank 0, {b.get(path)!r} of {other}"
        tensors = [] if key in self._merged else [(p, t) for p, t in leaves(self.state[key], (key,)) if type(t) is Leaf]
        for stage, i in product(self._alike[1:], range(tp)):
            for path, leaf in tensors:
                (shard, layout), (of_stage, _) = (self._checkpoint.rank(i, s).tensor(leaf) for s in (0, stage))
                over_stages = isinstance(layout, Layout) and "pp" in layout.axes
                if not over_stages and (shard.shape, shard.crc32) != (of_stage.shape, of_stage.crc32):
                    yield f"{dotted(path)} {only} stages 0 and {stage} hold different values"
        yield from (why for _, stored in _tensors(self.entry(key)) if (why := stored.bound()) is not None)

    def of_parameters(self) -> Iterator[OfParameter]:
        for key in filter(lambda key: is_optimizer(self.state[key]), self.state):
            optimizer = self.entry(key)
            indices = [index for group in optimizer["param_groups"] for index in group["params"]]
            numbers = {index: i for i, index in enumerate(indices) if isinstance(index, int)}
            names = dict(parameter_names(optimizer["param_groups"]))
            for index, values in optimizer["state"].items():
                for _, stored in _tensors(values) if index in numbers else ():
                    yield OfParameter(key, numbers[index], names.get(index), stored)

    def stored(self, leaf: Leaf, path: Path, stage: int | None = None) -> Stored:
        """What ``leaf``, at ``path`` of the state of a ``stage``, stands for; by default of this one."""
        stage = self._pp_rank if stage is None else stage
        if (known := self._stored.get((stage, leaf))) is not None:
            return known
        checkpoint, tp_rank, where = self._checkpoint, self._tp_rank or 0, dotted(path)
        directory = checkpoint.rank(tp_rank, stage)
        shard, layout = directory.tensor(leaf)
        staged = isinstance(layout, Layout) and "pp" in layout.axes  # its shards are those of all stages
        mesh, here = (
            (checkpoint.over_stages, stage * checkpoint.tp + tp_rank) if staged else (checkpoint.over_tp, tp_rank)
        )
        if isinstance(layout, Layout) and layout.local_shape(mesh) != shard.shape:
            raise CheckpointError(f"{directory.path}: {where} is {shard.shape} and not a shard of {layout}")

        def shard_of(i: int) -> FileTensor:
            if i == here:
                return shard
            at = mesh.coords(i)
            another = checkpoint.rank(at["tp"], at.get("pp", stage))
            other, other_layout = another.tensor(leaf)
            if isinstance(layout, Layout) and (other.shape, other_layout) != (shard.shape, layout):
                raise CheckpointError(
                    f"{another.path}: {where} is {other.shape} of {other_layout}, and in {directory.path} it is "
                    f"{shard.shape} of {layout}: the ranks saved different models"
                )
            return other

        stored = Stored(where, layout, mesh, None if self._tp_rank is None else here, shard_of)
        self._stored[stage, leaf] = stored
        return stored


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    for folder in (path, *(os.path.join(path, name) for name in ("shards", "tensor_parallel_shards"))):
        if os.path.lexists(os.path.join(folder, MANIFEST)):
            return Native(folder, how, stack)
    # if a save died between two renames, the new checkpoint is still in its staging directory
    real = os.path.realpath(path)
    folder = resolve(real)
    return None if folder == real else Native(folder, how, stack)


FORM = Form(sharded=True, open=_open)


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Stored]]:
    return ((at, leaf) for at, leaf in leaves(value, path) if isinstance(leaf, Stored))


def _filled(value: Any, fill: Fill) -> Any:
    return filled(value, Stored, lambda stored, _: fill(stored))
