"""Backends that are wrong in one place, and the test of the kit that has to find each first."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tpcore.backend.capabilities import Capabilities
from tpcore.mesh import Group, Mesh
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.kit import edges
from tpcore.testing.kit.conformance import Conformance
from tpcore.testing.threads import ThreadTransport
from tpcore.transport import Transport


def summed(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def mine(transport: Transport, x: Tensor, dim: int) -> Tensor:
    return x.chunk(transport.size, dim)[transport.index].clone()


class Plain(ThreadBackend):
    """Right, and with few dtypes, so that the kit is soon through."""

    transport_class: type[ThreadTransport] = ThreadTransport
    capabilities = Capabilities(
        dtypes=(torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool),
        moved=(torch.complex64,),
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


class Kit(Conformance):
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


ALL = tuple(name for name in vars(Conformance) if name.startswith("test_"))


def first_failure(cls: type[Plain], kind: type[Kit] = Kit, only: tuple[str, ...] = ALL) -> str:
    """Test and primitive, or mapping, of the first failure in the kit's order; "" if there is none."""
    kit = kind()
    kit.tested = cls  # type: ignore[misc]  # of this instance
    choices = kit.choices() | {"run": [run_on(cls)]}
    for name, test in vars(Conformance).items():
        if name not in only:
            continue
        wanted = [a for a in inspect.signature(test).parameters if a != "self"]
        # the first argument varies slowest, as in the file: one primitive at all dtypes and sizes
        order = sorted(wanted, key=lambda a: a not in ("primitive", "moving", "mapping", "linear", "layer"))
        for values in itertools.product(*(choices[a] for a in order)):
            given = dict(zip(order, values, strict=True))
            try:
                test(kit, **given)
            except (AssertionError, pytest.fail.Exception, RuntimeError, ValueError):
                what = [
                    str(given[a]).removeprefix("torch.")
                    for a in ("primitive", "moving", "mapping", "linear", "layer", "summed")
                    if a in given
                ]
                return " ".join([name, *what])
    return ""
