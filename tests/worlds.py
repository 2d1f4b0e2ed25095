"""Worlds of ranks: a test that each rank of one runs, and a world of which only one rank runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from tpcore import Mesh
from tpcore.testing import run_ranks
from tpcore.testing.threads import ThreadWorld

Test = Callable[..., None]


def each_rank(**axes: int | str) -> Callable[[Test], Test]:
    """The test runs on each rank of a mesh, and gets its context first. A size that is a name is that parameter's."""

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**given: Any) -> None:
            sizes = {axis: given[size] if isinstance(size, str) else size for axis, size in axes.items()}
            run_ranks(Mesh(sizes), lambda ctx: test(ctx, **given))

        _, *parameters = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


class Alike(ThreadWorld):
    """A world whose other ranks do what this one does."""

    def exchange(self, members: tuple[int, ...], rank: int, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        return [x for _ in members]
