"""Backends that are wrong in one place, and the test of the kit that has to find each first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from helpers.tiers import tiers
from torch import Tensor

from tpcore.backend.interface import Capabilities
from tpcore.comm.transport import Transport
from tpcore.layout.mesh import Group, Mesh
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.kit import collectives
from tpcore.testing.kit.contract import Contract
from tpcore.testing.threads import ThreadTransport


def summed(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def mine(transport: Transport, x: Tensor, dim: int) -> Tensor:
    return x.chunk(transport.size, dim)[transport.index].clone()


class Plain(ThreadBackend):
    """Right, and with few dtypes, so that the kit is soon through."""

    transport_class: type[ThreadTransport] = ThreadTransport
    capabilities = Capabilities(
        dtypes=(torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool), moved=(torch.complex64,)
    )

    def connect(self, group: Group, rank: int) -> ThreadTransport:
        return self.transport_class(group, rank, self._world)


class Full(Plain):
    """With the dtypes that some need beside those."""

    capabilities = replace(
        Plain.capabilities,
        dtypes=(*Plain.capabilities.dtypes, torch.float64, torch.float16, torch.int32),
        moved=(torch.float8_e4m3fn, torch.complex64),
    )


Made = Callable[..., Any]


class Faults(dict[str, tuple[str, type[Plain]]]):
    """By name: the test that has to fail first, and the backend."""

    def mutant(self, caught_by: str, base: type[Plain] = Plain) -> Callable[[type], type]:
        """Register a backend, or a transport, which gets a backend like ``base``."""

        def register(cls: type) -> type:
            backend = issubclass(cls, Plain)
            made = cls if backend else type(cls.__name__, (base,), {"transport_class": cls})
            self[cls.__name__] = caught_by, made
            return cls

        return register

    def wrong(self, caught_by: str, base: type[Plain] = Plain, of: str = "", **methods: Made) -> None:
        """Register transports whose method ``of``, by default the second word of ``caught_by``, is another: a function
        of the transport, ``out`` (the right result) or ``right`` (the right method) where it takes that, and the
        method's arguments. The right result stands where it returns False."""
        for name, method in methods.items():
            own = {of or caught_by.split()[1]: instead(of or caught_by.split()[1], method)}
            self.mutant(caught_by, base)(type(name, (ThreadTransport,), own))

    def backends(self, caught_by: str, base: type[Plain] = Plain, **members: dict[str, Any]) -> None:
        """Register backends like ``base`` with other members."""
        for name, own in members.items():
            self[name] = caught_by, type(name, (base,), own)


def instead(of: str, method: Made) -> Made:
    takes = list(signature(method).parameters)[1]

    def call(self: ThreadTransport, x: Tensor, *arguments: Any) -> Any:
        right = functools.partial(getattr(ThreadTransport, of), self)
        first = [right(x, *arguments)] if takes == "out" else [right] if takes == "right" else []
        made = method(self, *first, x, *arguments)
        if made is not False:
            return made
        return first[0] if takes == "out" else right(x, *arguments)

    return call


class Kit(Contract):
    worlds = (2, 4)
    starts = False  # threads of one process
    every, seed = 100, 1
    large = collectives.LARGE[:-1]
    tested: type[Plain] = Plain

    def backend_class(self) -> type[Plain]:
        return self.tested


def run_on(cls: type[Plain]) -> Made:
    def run(mesh: Mesh, fn: Made, *args: Any) -> list[list[str]]:
        return run_ranks(mesh, lambda ctx: fn(ctx, *args), backend=cls)

    return run


ALL = tuple(name for name in vars(Contract) if name.startswith("test_") and name != "test_lost_ranks")
NAMED_BY = ("primitive", "method", "moving", "mapping", "linear", "layer")


def failures(cls: type[Plain], kind: type[Kit] = Kit, only: tuple[str, ...] = ALL) -> Iterator[str]:
    """For each case of the tests ``only``: "test_values all_gather" if it fails, else ""."""
    kit = kind()
    kit.tested = cls  # type: ignore[misc]  # of this instance
    for name in only:
        test, _, part = name.partition(" ")
        for given in kit.cases(test, run_on(cls)):
            what = " ".join(str(given[a]).removeprefix("torch.") for a in NAMED_BY if a in given)
            if part not in ("", what):
                continue
            try:
                getattr(kit, test)(**given)
            except (AssertionError, RuntimeError, ValueError):
                yield f"{test} {what}".strip()
            else:
                yield ""


def found(caught_by: str, cls: type[Plain], kind: type[Kit] = Kit) -> bool:
    """Whether the test that a fault is registered for fails. It stops at the first case that does."""
    return any(failures(cls, kind, (caught_by,)))


def first_of(faults: Faults, *tests: str, one_in: int = 1) -> list[Any]:
    """All names, for ``parametrize``. Slow are all but the first fault of each of these tests of the kit, and all but
    one in so many of them are drills."""
    first = {by.partition(" ")[0]: name for name, (by, _) in reversed(faults.items())}
    quick = [first[test] for test in tests]
    slow = [name for name in faults if name not in quick]
    return tiers(quick, slow[::one_in], slow)
