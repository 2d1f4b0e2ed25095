"""Processes for a function: those of torchrun, else new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tpcore
from tpcore import settings
from tpcore.backend.registry import backend_class
from tpcore.runtime.init import default_backend

from .runtime import local_ordinal

__all__ = ["launch", "spawn"]


def _ranked(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    fn(local_ordinal(), *args)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """``fn(local rank, *args)`` on each of ``nprocs`` processes, by default one for each device of this machine.

    In a process of torchrun, which is a rank already, ``fn`` is called here. ``daemon`` and ``start_method`` change
    nothing: processes are fresh ones, and end with this one. ValueError for ``join=False``.
    """
    if not join:
        raise ValueError("spawn(join=False): the call returns when all ranks have ended; start it in a thread")
    count = backend_class(default_backend()[0]).most_ranks() or 1 if nprocs is None else nprocs
    if settings.WORLD_SIZE.is_set or count == 1:
        _ranked(fn, tuple(args))
    else:
        tpcore.launch(_ranked, count, args=(fn, tuple(args)))


def launch(
    fn: Callable[..., Any], args: Sequence[Any] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> None:
    """``spawn``, in one process with ``debug_single_process``."""
    spawn(fn, args, 1 if debug_single_process else None)
