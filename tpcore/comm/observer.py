"""What looks on while layers compute: in a checked run, the observers that extensions bring."""

from __future__ import annotations

from torch import Tensor

from .comm import Comm


class Observer:
    """Is told by layers what a tensor is to the ranks of a group. A subclass overrides what it wants to know."""

    def __deepcopy__(self, memo: object) -> Observer:
        return self  # a copied layer has the same observer

    def same(self, name: str, t: Tensor) -> None:
        """``t`` has to be equal on all ranks of tp, or the layers compute something else than the whole model."""

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        """What a layer returns in place of ``y``, this rank's chunk along ``dim`` of the ``kind``, "features",
        "fused features" of several projections, or "tokens": ``y`` itself, or as an ``Observed`` to see what a model
        does with it."""
        return y

    def compare(self, comm: Comm) -> None:
        """A step begins, on all ranks of ``comm`` together: collectives may be made."""


class Observers(Observer):
    """Several, of which each is told all."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def same(self, name: str, t: Tensor) -> None:
        for observer in self._observers:
            observer.same(name, t)

    def part(self, y: Tensor, comm: Comm, dim: int, kind: str) -> Tensor:
        for observer in self._observers:
            y = observer.part(y, comm, dim, kind)
        return y

    def compare(self, comm: Comm) -> None:
        for observer in self._observers:
            observer.compare(comm)


class Observed(Tensor):
    """A tensor whose class sees the operations on it. Layers compute with the tensor alone: ``plain``."""


def plain(t: Tensor) -> Tensor:
    # by type: isinstance asks the metaclass, which takes five times as long
    return t if type(t) is Tensor or not issubclass(type(t), Observed) else t.as_subclass(Tensor)
