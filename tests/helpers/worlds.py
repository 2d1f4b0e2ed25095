"""Worlds of ranks: a test that each rank of one runs, a world of which only one rank runs, and what ranks hold."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Peak(TorchDispatchMode):
    """The most bytes at a time of what is made inside, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in {t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)}:
            if id(storage) not in self.seen:  # a storage is one object as long as any tensor has it
                self.seen.add(id(storage))
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self.seen.remove(key)
        self.now -= nbytes
