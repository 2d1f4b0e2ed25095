"""Backends that are wrong in one place, and the test of the kit that has to find each first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tpcore.backend.interface import Capabilities
from tpcore.comm.transport import Transport
from tpcore.layout.mesh import Group, Mesh
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.kit import edges
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


Made = Callable[..., Any]


class Registry(dict[str, tuple[str, type[Plain]]]):
    """By name: the test that has to fail first, and the backend."""

    def mutant(self, caught_by: str, base: type[Plain] = Plain) -> Callable[[type], type]:
        """Register a backend, or a transport, which gets a backend like ``base``."""

        def register(cls: type) -> type:
            backend = issubclass(cls, Plain)
            self[cls.__name__] = (
                caught_by,
                (cls if backend else type(cls.__name__, (base,), {"transport_class": cls})),
            )
            return cls

        return register


class Kit(Contract):
    worlds = (2, 4)
    starts = False  # threads of one process
    every = 100
    tested: type[Plain] = Plain

    def backend_class(self) -> type[Plain]:
        return self.tested


class Sampled(Kit):
    """What a fault passes that a later test catches: fewer dtypes, and no 16 MB."""

    large = edges.LARGE[:-1]

    def choices(self) -> dict[str, list[Any]]:
        return super().choices() | {"dtype": [torch.float32, torch.bool]}


def run_on(cls: type[Plain]) -> Made:
    def run(mesh: Mesh, fn: Made, *args: Any) -> list[list[str]]:
        return run_ranks(mesh, lambda ctx: fn(ctx, *args), backend=cls)

    return run


ALL = tuple(name for name in vars(Contract) if name.startswith("test_") and name != "test_lost_ranks")
NAMED_BY = ("primitive", "method", "moving", "mapping", "linear", "layer", "summed")


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


def first_of(registry: Registry, *tests: str) -> list[Any]:
    """All names, for ``parametrize``. Slow are all but the first fault of each of these tests of the kit."""
    first = {by.partition(" ")[0]: name for name, (by, _) in reversed(registry.items())}
    quick = {first[test] for test in tests}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in registry]
