"""What a form of checkpoint is, and what every opened checkpoint gives to its readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...shard import ShardSpec
from ..tensors.stored import Stored

State = dict[str, Any]
"""A model's state by name: a Stored for every tensor, anything else as it is."""
Cuts = Callable[[str, tuple[int, ...], int], ShardSpec | None]
"""How a tensor is cut, by name, shape of a shard and number of shards; None where all ranks hold the same."""
Fill = Callable[[Stored], Tensor]
"""Makes the tensor that takes the place of a stored one in a nested state."""


class OfParameter(NamedTuple):
    """A tensor in the state of the optimizer at ``key``: of parameter ``number`` in the order of its groups,
    whose ``name`` is known where the optimizer was made from named parameters."""

    key: Any
    number: int
    name: str | None
    stored: Stored


@dataclass(frozen=True)
class Reading:
    """How files that others wrote are read. ``quiet``: another rank warns; ``trust``: of pickles at all."""

    model_key: str | None = "model"
    trust: bool = True
    quiet: bool = False


class Stage(ABC):
    """One pipeline stage of a checkpoint: the model in it, and the entries beside the model.

    It is opened for a rank whose own shards and entries are wanted as they are, or for nobody: then it has
    what can be had at any degree.
    """

    @abstractmethod
    def model(self, fill: Fill | None = None) -> State:
        """The model. ``fill`` makes the tensors within entries of it that are no tensors themselves."""

    @abstractmethod
    def entries(self, fill: Fill, without: Collection[Any] = (), *, model: bool = False) -> Any:
        """What lies beside the model, or with ``model`` all there is, ``without`` these keys."""

    def bound(self, *, model: bool = False) -> Mapping[Any, str]:
        """The keys of ``entries`` that can be had only at the degree of the save, and why."""
        return {}

    def states(self) -> Sequence[Mapping[str, Any]] | None:
        """Each rank's own entry ``model_key``, where nothing in the checkpoint says how that is cut."""
        return None

    def of_parameters(self) -> Iterator[OfParameter]:
        """The tensors in optimizers' states, where they can be had one by one."""
        return iter(())

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """All tensors that ``tpcore checkpoint inspect`` lists."""
        for name, item in self.model().items():
            if isinstance(item, Stored):
                yield name, item


class Source(ABC):
    """An opened checkpoint, of ``tp`` ranks in each of ``pp`` stages. Its form in words is ``form``."""

    form: str
    path: str
    tp: int
    pp: int
    sharded = True
    save_id = ""
    """Names one save, where the form has such a name: all ranks of a job must have opened the same."""

    @abstractmethod
    def stage(self, pp_rank: int, own: int | None, cuts: Cuts) -> Stage:
        """A stage for tp rank ``own``, or for nobody. ``cuts`` says what is on record nowhere."""

    def entries_of_all(self, cuts: Cuts, names: Sequence[str] | None = None) -> Stage | None:
        """What lies beside the model on all stages alike, where a job of other stages can have it.

        ``names``: of the parameters of which an optimizer's state is wanted, in its order; None: all.
        """
        return None

    @property
    def mixed(self) -> bool:
        """Whether some tensors of the original model are in no rank's shards as they are."""
        return False


class Form(NamedTuple):
    """One form of checkpoint. ``open`` gives None where what lies at the path is of another form."""

    sharded: bool
    open: Callable[[str, Reading, ExitStack], Source | None]
