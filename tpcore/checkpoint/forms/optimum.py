"""Shards of optimum-neuron, with its metadata files: cut dims and fused linears."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout.shard import ShardSpec
from ..tensors.stored import Stored
from .pickled import PickledShards, find
from .pickles import mapped
from .rank_files import even_cut
from .recorded import Recorded, read_metadata
from .source import Form, Reading, Source, State
from .transformations import Attention, Fused, Original


class OptimumShards(PickledShards):
    """Pickled shards with metadata files."""

    def __init__(self, path: str, files: Sequence[Sequence[str]], how: Reading, recorded: Sequence[Recorded]) -> None:
        super().__init__(path, files, how)
        self._recorded = recorded

    @property
    def mixed(self) -> bool:
        return any(stage.made for stage in self._recorded)

    def cut(self, name: str, shape: tuple[int, ...], pp_rank: int) -> ShardSpec | None:
        dim = self._recorded[pp_rank].dims.get(name)
        if dim is None and not any(name in stage.names for stage in self._recorded):
            dim = self._of_tied(name, pp_rank)
        return None if dim is None else even_cut(shape, self.tp, dim)

    def _of_tied(self, name: str, pp_rank: int) -> int | None:
        """The cut dim of a tensor that is recorded under another name, maybe of another stage: the one with
        the same values on all ranks."""
        mine = [self.read(file)[0][name] for file in self.files[pp_rank]]
        if all(_equal(t, mine[0]) for t in mine):
            return None  # not cut: a buffer
        for stage, recorded in enumerate(self._recorded):
            every = [self.read(file)[0] for file in self.files[stage]]
            for other, dim in recorded.dims.items():
                if all(_equal(state.get(other), t) for state, t in zip(every, mine, strict=True)):
                    return dim
        return None

    def originals(self, states: Sequence[Mapping[str, Any]], pp_rank: int) -> tuple[State, set[str]]:
        found: State = {}
        transformations = self._recorded[pp_rank].made
        for made in transformations:
            names = [name for name in made.used() if name not in states[0]]
            if names == made.used():
                continue  # not saved
            if names:
                raise CheckpointError(f"{self.files[pp_rank][0]} has no {names[0]!r}, which its metadata name")
            for name, dim, pieces in self._originals(made, states):
                parts = [mapped(piece, name, self.path) for piece in pieces]
                cut = even_cut(parts[0].shape, len(parts), dim)
                found[name] = Stored.over_tp(name, cut, len(parts), None, parts.__getitem__)
        used = {name for made in transformations for name in made.used()}
        return found, used | self._of_others(states[0], pp_rank)

    def _of_others(self, state: Mapping[str, Any], pp_rank: int) -> set[str]:
        """Names in a stage's file that stand for parameters of other stages: some versions write all of the
        model there, and what this stage does not have without values."""
        mine = self._recorded[pp_rank].names
        every = {name for stage in self._recorded for name in stage.names}
        empty = {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}
        return ((every & state.keys()) | empty) - mine

    def _originals(self, made: Fused | Attention, states: Sequence[Mapping[str, Any]]) -> list[Original]:
        try:
            return list(made.originals({name: [state[name] for state in states] for name in made.used()}))
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as e:
            why = f"{type(e).__name__}: {e}"
            raise CheckpointError(f"{self.path}: {made.used()} are not as their metadata say: {why}") from e


def _equal(a: Any, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.is_meta or b.is_meta or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a, b)


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    found = find(path)
    if found is None:
        return None
    root, stages = found
    above = os.path.dirname(root) if os.path.basename(root) == "model" else root
    recorded = read_metadata(above, len(stages), how)
    return OptimumShards(path, stages, how, recorded) if recorded else None


FORM = Form(sharded=True, open=_open)
