"""tpcore's own form: a directory with a manifest and the cut of each tensor."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import cached_property
from itertools import product
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ..manifest import Checkpoint
from ..storage.files import MANIFEST
from ..storage.publish import resolve
from ..storage.tensorfile import FileTensor
from ..stored import ReadPlan, Stored
from ..tree import Leaf, Path, dotted, filled, is_nested, is_optimizer, leaves, parameter_names
from .source import Cuts, Fill, Form, OfParameter, Reading, Source, Stage, State


class Native(Checkpoint, Source):
    form = "tpcore checkpoint"

    def __init__(self, path: str, how: Reading, stack: ExitStack) -> None:
        super().__init__(path, stack)
        self.save_id, self._model_key = self.manifest.save_id, how.model_key

    def stage(self, pp_rank: int, own: int | None, cuts: Cuts) -> NativeStage:
        return NativeStage(self, self._model_key, pp_rank, own)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """All that ``tpcore checkpoint inspect`` lists: those of other entries than the model too."""
        for pp_rank in range(self.pp):
            stage = NativeStage(self, self._model_key, pp_rank, 0 if self.tp == 1 else None)
            for path, leaf in leaves(stage.state):
                if isinstance(leaf, Leaf):
                    yield dotted(path), stage.stored(leaf, dotted(path))

    def entries_of_all(self, cuts: Cuts, names: Sequence[str] | None = None) -> Stage:
        stage = NativeStage(self, self._model_key, 0, None, range(self.pp))
        stage.merge(names)
        return stage


class NativeStage(Stage):
    """One stage. At another degree, the first rank's entries represent those of all ranks."""

    def __init__(
        self, checkpoint: Checkpoint, model_key: str | None, pp_rank: int, own: int | None, alike: Sequence[int] = ()
    ) -> None:
        self._alike = alike or (pp_rank,)  # the stages that this one's entries represent
        self._checkpoint, self._model_key, self._own = checkpoint, model_key, own
        self._pp_rank = pp_rank
        self._first = checkpoint.rank(own or 0, pp_rank)
        self._stored: dict[tuple[int, Leaf], Stored] = {}  # one object per stored tensor, also if tied
        self.state = self._first.state
        self._merged: dict[Any, dict[str, Any]] = {}  # optimizers of all stages

    def merge(self, names: Sequence[str] | None) -> None:
        """Merge the optimizers' state from all stages. ``names``: the wanted parameters; None: all."""
        for key in self.state:
            stages = [self._optimizer(key, stage) for stage in self._alike]
            one = merged(stages, names) if all(map(is_optimizer, stages)) else None
            if one is not None:
                self._merged[key] = one

    def _optimizer(self, key: Any, stage: int) -> Any:
        """The optimizer's state at ``key``, with a Stored for each tensor; None for another entry."""
        item = self._checkpoint.rank(self._own or 0, stage).state.get(key)
        if not is_optimizer(item):
            return None
        return filled(item, lambda leaf, path: self.stored(leaf, dotted(path), stage), (key,))

    @cached_property
    def _nested(self) -> bool:
        return is_nested(self.state, self._model_key, self._checkpoint.path)

    def model(self, fill: Fill | None = None) -> State:
        top = self.state[self._model_key] if self._nested else self.state
        return {
            str(name): self.stored(item, str(name)) if isinstance(item, Leaf) else self._filled(item, fill)
            for name, item in top.items()
        }

    def _filled(self, value: Any, fill: Fill | None) -> Any:
        def of(leaf: Leaf, path: Path) -> Tensor | ReadPlan | Stored:
            stored = self.stored(leaf, leaf.name)
            return stored if fill is None else fill(stored)

        return filled(value, of)

    def _keys(self, model: bool) -> list[Any]:
        if model:
            return list(self.state)
        return [key for key in self.state if key != self._model_key] if self._nested else []

    def entries(self, fill: Fill, without: Collection[Any] = (), *, model: bool = False) -> Any:
        of_stage = copy(self.state)  # of its type
        for key in self.state.keys() - {key for key in self._keys(model) if key not in without}:
            del of_stage[key]
        merged = {key: tree_map_only(Stored, fill, self._merged[key]) for key in self._merged.keys() & of_stage.keys()}
        of_stage.update(dict.fromkeys(merged))
        state = self._filled(of_stage, fill)
        state.update(merged)
        return state

    def bound(self, *, model: bool = False) -> Mapping[Any, str]:
        if self._own is not None:
            return {}
        reasons = {key: self._difference(key) or self._uncut(key) for key in self._keys(model)}
        return {key: why for key, why in reasons.items() if why is not None}

    def _difference(self, key: Any) -> str | None:
        """The first difference between ranks in a top-level entry, as an error text; None if they agree."""
        for stage, i in product(self._alike, range(self._checkpoint.tp)):
            mine = self._checkpoint.rank(0, stage).state[key] if key in self._merged else self.state[key]
            theirs = self._checkpoint.rank(i, stage).state.get(key)
            a, b = (dict(leaves(value, (key,))) if theirs != mine else {} for value in (mine, theirs))
            path = next((p for p in a | b if repr(a.get(p, ...)) != repr(b.get(p, ...))), None)  # a nan is itself
            if path is not None:
                stages = f", pp={self._checkpoint.pp}" if len(self._alike) > 1 else ""
                other = f"{i} of stage {stage}" if stages else f"{i}"
                return (
                    f"{dotted(path)} can be loaded only at the degree it was saved at, "
                    f"tp={self._checkpoint.tp}{stages}: it is {a.get(path)!r} of tp rank 0, {b.get(path)!r} of {other}"
                )
        return None if key in self._merged else self._other_values(key)

    def _other_values(self, key: Any) -> str | None:
        """The first tensor of an entry that differs between stages, as an error text; None if they agree."""
        tensors = [(path, leaf) for path, leaf in leaves(self.state[key], (key,)) if isinstance(leaf, Leaf)]
        for stage, i in product(self._alike[1:], range(self._checkpoint.tp)):
            for path, leaf in tensors:
                (mine, cut), (theirs, _) = (self._checkpoint.rank(i, s).tensor(leaf) for s in (0, stage))
                over_stages = isinstance(cut, Layout) and "pp" in cut.axes
                if not over_stages and (mine.shape, mine.crc32) != (theirs.shape, theirs.crc32):
                    return (
                        f"{dotted(path)} can be loaded only at the degree it was saved at, "
                        f"pp={self._checkpoint.pp}: stages 0 and {stage} hold different values"
                    )
        return None

    def _uncut(self, key: Any) -> str | None:
        """Why a tensor in a top-level entry cannot be cut for another degree; None if all can."""
        value = self._merged.get(key)
        if value is None:
            value = filled(self.state[key], lambda leaf, path: self.stored(leaf, dotted(path)), (key,))
        return next((why for stored in _tensors(value) if (why := stored.bound()) is not None), None)

    def of_parameters(self) -> Iterator[OfParameter]:
        for key in self.state:
            optimizer = self._merged.get(key) or self._optimizer(key, self._pp_rank)
            if not is_optimizer(optimizer):
                continue
            order = [index for group in optimizer["param_groups"] for index in group["params"]]
            names = dict(parameter_names(optimizer["param_groups"]))
            for index, values in optimizer["state"].items():
                for stored in _tensors(values) if index in order else ():
                    yield OfParameter(key, order.index(index), names.get(index), stored)

    def stored(self, leaf: Leaf, where: str, stage: int | None = None) -> Stored:
        path, stage = self._first.path, self._pp_rank if stage is None else stage
        if (stage, leaf) not in self._stored:
            shard, cut = self._checkpoint.rank(self._own or 0, stage).tensor(leaf)
            staged = isinstance(cut, Layout) and "pp" in cut.axes  # its shards are those of all stages
            mesh = Mesh(({"pp": self._checkpoint.pp} if staged else {}) | {"tp": self._checkpoint.tp})
            at = {"pp": stage, "tp": self._own or 0}
            if isinstance(cut, Layout) and cut.local_shape(mesh) != shard.shape:
                raise CheckpointError(f"{path}: {where} is {shard.shape} and not a shard of {cut}")
            here = mesh.rank({axis: at[axis] for axis in mesh.axes})
            shards = {here: shard}

            def shard_of(i: int) -> FileTensor:
                if i not in shards:
                    there = at | mesh.coords(i)
                    directory = self._checkpoint.rank(there["tp"], there["pp"])
                    other, other_cut = directory.tensor(leaf)
                    if isinstance(cut, Layout) and (other.shape, other_cut) != (shard.shape, cut):
                        raise CheckpointError(
                            f"{directory.path}: {where} is {other.shape} of {other_cut}, and in {path} it is "
                            f"{shard.shape} of {cut}: the ranks saved different models"
                        )
                    shards[i] = other
                return shards[i]

            own = None if self._own is None else here
            self._stored[stage, leaf] = Stored(where, cut, mesh, own, shard_of)
        return self._stored[stage, leaf]


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    for folder in (path, *(os.path.join(path, name) for name in ("shards", "tensor_parallel_shards"))):
        if os.path.lexists(os.path.join(folder, MANIFEST)):
            return Native(folder, how, stack)
    # if a save died between two renames, the new checkpoint is still in its staging directory
    real = os.path.realpath(path)
    folder = resolve(real)
    return None if folder == real else Native(folder, how, stack)


FORM = Form(sharded=True, open=_open)


def _tensors(value: Any) -> list[Stored]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Stored)]


def merged(stages: Sequence[dict[str, Any]], names: Sequence[str] | None) -> dict[str, Any] | None:
    """One optimizer's state of the stages', for the parameters ``names`` in order; None if a stage has no names."""
    groups = [optimizer["param_groups"] for optimizer in stages]
    if len({len(g) for g in groups}) > 1 or not all(_named(group) for g in groups for group in g):
        return None
    state: dict[int, Any] = {}
    merged_groups: list[dict[str, Any]] = []
    number = 0
    for group_of_stages in zip(*groups, strict=True):
        members: dict[str, tuple[int, int]] = {}  # the first stage wins for a parameter of several stages
        for stage, group in enumerate(group_of_stages):
            for name, index in zip(group["param_names"], group["params"], strict=True):
                members.setdefault(name, (stage, index))
        wanted = [name for name in (members if names is None else names) if name in members]
        for at, name in enumerate(wanted, number):
            stage, index = members[name]
            if index in stages[stage]["state"]:
                state[at] = stages[stage]["state"][index]
        numbers = list(range(number, number + len(wanted)))
        merged_groups.append({**group_of_stages[0], "params": numbers, "param_names": wanted})
        number += len(wanted)
    return {**stages[0], "state": state, "param_groups": merged_groups}


def _named(group: Any) -> bool:
    return isinstance(group, dict) and len(group.get("param_names") or ()) == len(group["params"])
