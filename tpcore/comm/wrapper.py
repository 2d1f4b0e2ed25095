"""Transports that wrap another, or stand for it in a graph: all primitives go through one method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..layout.mesh import Group
from .signature import ALL, Call, call_place, checked_calls, compare
from .transport import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, TABLE, Op, Pending, Primitive, Transport


def _relayed(primitive: Primitive) -> Any:
    def method(self: TransportWrapper, x: Tensor, *arguments: Any) -> Tensor:
        return self.relay(primitive, x, *arguments)

    method.__name__ = method.__qualname__ = primitive.name
    return method


class TransportWrapper(Transport):
    """A transport whose primitives all call ``relay``, which subclasses write."""

    # not by the loop below: they are abstract until the class is made
    all_reduce, all_gather, reduce_scatter = map(_relayed, (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER))

    @abstractmethod
    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        """Make the collective ``primitive`` of ``x`` and ``arguments``."""


for _primitive in TABLE:
    if _primitive.name not in vars(TransportWrapper):  # the others would inherit Transport's defaults
        setattr(TransportWrapper, _primitive.name, _relayed(_primitive))


class DelegatingTransport(TransportWrapper):
    """A transport that stands before ``inner``: it makes the same collectives."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.group, self.size, self.members = inner.group, inner.size, inner.members
        self.index, self.position = inner.index, inner.position

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def process_group(self) -> Any:
        return self._inner.process_group

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        out: Tensor = getattr(self._inner, primitive.name)(x, *arguments)
        return out


class Checked(DelegatingTransport):
    """Compares the calls of a group's ranks over the group itself. If they differ, all ranks raise an error. The
    first calls are compared before they run, which prevents hangs and wrong numbers; ``TPCORE_CHECK`` sets how many.
    Later calls are compared in runs of ``RUN``: one exchange for each call would cost as much as a small call."""

    RUN: ClassVar[int] = 32

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._seq, self._checked = 0, checked_calls()
        self._run: list[Call] = []

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        self._enter(primitive, x, arguments)
        return super().relay(primitive, x, *arguments)

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        self._enter(ALL_REDUCE, x, (op, donate))
        return self._inner.start_all_reduce(x, op, donate)

    def start_reduce_scatter(self, x: Tensor, dim: int, donate: bool) -> Pending:
        self._enter(REDUCE_SCATTER, x, (dim,))
        return self._inner.start_reduce_scatter(x, dim, donate)

    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        self._enter(PERMUTE, x, (to,))
        return self._inner.start_permute(x, to)

    def _enter(self, primitive: Primitive, x: Tensor, arguments: tuple[Any, ...]) -> None:
        if not self._checked:
            return
        self._seq += 1
        call = Call.of(self._seq, primitive.describe(*arguments), x.shape, x.dtype, call_place())
        self._run.append(call)
        if self._seq <= self._checked or len(self._run) == self.RUN:
            run, self._run = self._run, []
            compare(run, self.members, self._exchange, self._checked == ALL)

    def _exchange(self, local: bytes) -> bytes:
        sent = torch.frombuffer(bytearray(local), dtype=torch.uint8).to(self.position.device)
        return self._inner.all_gather(sent, 0).cpu().numpy().tobytes()


NAMESPACE = "tpcore"
Find = Callable[[str], Any]
"""The current Comm of a name."""


def define(find: Find) -> torch.library.Library:
    """Define the operators ``tpcore::all_reduce``..., as long as the result lives; ``find``: the Comm of a name."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for primitive in TABLE:
        library.define(primitive.name + _schema(primitive))
        name = f"{NAMESPACE}::{primitive.name}"
        torch.library.impl(name, "CompositeExplicitAutograd", lib=library)(_run(primitive, find))
        torch.library.register_fake(name, _shape(primitive), lib=library)
    return library


def _schema(primitive: Primitive) -> str:
    """The primitive's arguments, the group's size if the result's shape depends on it, and the group's name."""
    size = {} if primitive.shape is None else {"size": "int"}
    parameters = {"x": "Tensor", **primitive.arguments, **size, "axes": "str"}
    return f"({', '.join(f'{kind} {name}' for name, kind in parameters.items())}) -> Tensor"


def _run(primitive: Primitive, find: Find) -> Callable[..., Tensor]:
    def run(x: Tensor, *arguments: Any) -> Tensor:
        named = dict(zip(primitive.arguments, arguments, strict=False))
        if "donate" in named:  # an operator must not return its argument's memory
            named["donate"] = False
        output: Tensor = getattr(find(arguments[-1]), primitive.name)(x, **named)
        return output

    return run


def _shape(primitive: Primitive) -> Callable[..., Tensor]:
    count = len(primitive.arguments)

    def shape(x: Tensor, *arguments: Any) -> Tensor:
        return primitive.result(x, 0 if primitive.shape is None else arguments[count], *arguments[:count])

    return shape


class Operators(TransportWrapper):
    """Puts operators in place of collectives into the graph that is being traced."""

    def __init__(self, group: Group, size: int, name: str) -> None:
        self.group, self.size, self._name = group, size, name

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        size = () if primitive.shape is None else (self.size,)
        output: Tensor = getattr(getattr(torch.ops, NAMESPACE), primitive.name)(x, *arguments, *size, self._name)
        return output
