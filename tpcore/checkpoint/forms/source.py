"""Interfaces of a form of checkpoint and of an open checkpoint."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError
from ...layout.shard import ShardSpec
from ..stored import ReadPlan, Stored

State = dict[str, Any]
"""A model's state by name: a Stored for each tensor, other values unchanged."""
SpecOf = Callable[[str, tuple[int, ...], int], ShardSpec | None]
"""The cut of a tensor, from its name, shard shape and number of shards. None if it is not known to be sharded."""
Fill = Callable[[Stored], Tensor | ReadPlan]
"""Returns what replaces a stored tensor in a nested state."""


class OfParameter(NamedTuple):
    """A tensor in the state of the optimizer at ``key``. ``number``: the position of its parameter in the
    optimizer's groups. ``name``: the parameter's name, if the optimizer was made from named parameters."""

    key: Any
    number: int
    name: str | None
    stored: Stored


@dataclass(frozen=True)
class Reading:
    """Options for files of other libraries. ``trust``: whether to read pickles. ``quiet``: do not warn."""

    model_key: str | None = "model"
    trust: bool = True
    quiet: bool = False


class Stage(ABC):
    """One pipeline stage of a checkpoint: its part of the model, and the other entries. It is opened for one tp rank,
    or for no rank, with the tensors and entries that can be loaded at any degree."""

    @abstractmethod
    def model(self, fill: Fill | None = None) -> State:
        """The model's state. ``fill`` is applied to tensors nested in values that are not tensors."""

    @abstractmethod
    def entries(self, fill: Fill, without: Collection[Any] = (), *, model: bool = False) -> Any:
        """The entries other than the model, or with ``model`` all entries, except the keys ``without``."""

    def bound(self, *, model: bool = False) -> Mapping[Any, str]:
        """The keys of ``entries`` that can be loaded only at the degree of the save, with the reasons."""
        return {}

    def states(self) -> Sequence[Mapping[str, Any]] | None:
        """The entry ``model_key`` of each rank, if the checkpoint does not record its cut; otherwise None."""
        return None

    def of_parameters(self) -> Iterator[OfParameter]:
        """The tensors in optimizers' states, for forms that store them one by one."""
        return iter(())


class Source(ABC):
    """An open checkpoint of ``tp`` ranks in each of ``pp`` stages. ``form``: its form in words."""

    form: str
    path: str
    tp: int
    pp: int
    sharded = True
    mixed = False
    """Whether some tensors of the original model are stored only fused or reordered."""
    restages = False
    """Whether it opens on as many stages of other layers, optimizers' states included."""
    save_id = ""
    """Identifies one save, or is empty. All ranks of a job must have opened the same save."""

    @abstractmethod
    def stage(self, pp_rank: int, tp_rank: int | None, spec_of: SpecOf) -> Stage:
        """A stage for ``tp_rank``, or for no rank. ``cuts``: the cuts that the checkpoint lacks."""

    def entries_of_all(self, spec_of: SpecOf, names: Sequence[str] | None = None) -> Stage:
        """The entries for a job with another number of stages: those equal on all stages, and optimizers' states.
        ``names``: the parameters whose state is wanted, in order; None: all. CheckpointError in a form without that."""
        raise CheckpointError(f"{self.path} was saved at pp={self.pp}, and a {self.form} opens at that pp alone")


class Form(NamedTuple):
    """One form of checkpoint. ``open`` returns None if the path has another form."""

    sharded: bool
    open: Callable[[str, Reading, ExitStack], Source | None]


def inside(root: str, name: str, index: str) -> str:
    """Path of file ``name`` in ``root``. CheckpointError if it is missing or outside. ``index``: names it."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise CheckpointError(f"{index} names {name!r}, which is not a file in {root}")
    path = os.path.join(root, name)
    real, home = os.path.realpath(path), os.path.realpath(root)
    # Hugging Face's download cache has links from a snapshot to ../../blobs/<hash>
    cache, _, _ = home.rpartition(f"{os.sep}snapshots{os.sep}")
    if not real.startswith(home + os.sep) and not (cache and os.path.dirname(real) == os.path.join(cache, "blobs")):
        raise CheckpointError(f"{path} is a link out of {root}")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}, which {index} names, is missing")
    return path
