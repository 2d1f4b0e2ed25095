"""Worlds of ranks: a test that each rank of one runs, and a world of which only one rank runs."""

from __future__ import annotations

import inspect
import re
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


def by_call(table: str) -> dict[str, str]:
    """What is said of each call of a table: its lines, and indented below it those of a regular expression."""
    rows = [row.splitlines() for row in re.split(r"\n(?=\S)", table.strip())]
    return {call: " ".join(line.strip() for line in said) for call, *said in rows}


class Alike(ThreadWorld):
    """A world whose other ranks do what this one does."""

    def exchange(self, members: tuple[int, ...], rank: int, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        return [x for _ in members]
