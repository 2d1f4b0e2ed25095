"""The calls at which all replicas must meet: those by which torch_xla compiles and runs a program. All ranks of a
run share one executable, because collectives of different executables never meet. torch_xla caches executables by
the hash of the graph. So it suffices that the graphs are equal, which is checked here, and that one rank compiles
before the others run. Between two meetings a rank runs as in a process of its own: the process's state (random state,
environment, tpcore's context) is swapped with it."""

from __future__ import annotations

import difflib
import os
import random
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from tpcore import settings
from tpcore.comm.signature import call_site
from tpcore.errors import CollectiveMismatchError
from tpcore.runtime.context import swap_process
from tpcore.testing.threads import RankThreads

from ..reads import READS, leaves_device, preceded
from .stablehlo import HloProgram, pending

_XLA: Any = torch_xla._XLAC
_COLLECTIVE = re.compile(r"xla::(cross_replica_sum|all_gather|reduce_scatter|all_to_all|collective_permute)")
_COMPARISONS = ("equal", "allclose")  # these read both arguments, in C++
_SHOWN = 12  # differing lines in a message
_HERE = threading.local()


class ReplicaThreads(RankThreads):
    """One run of a function on all replicas, and each rank's programs so far."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.programs: dict[int, list[HloProgram]] = defaultdict(list)

    def saved(self) -> Callable[[], object]:
        states: list[Callable[[], object]] = [
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
            partial(settings.restore, settings.environment()),
            partial(swap_process, swap_process([])),
        ]
        return lambda: [restore() for restore in states]


class Point(NamedTuple):
    """Where a rank waits. All ranks must come to the same point; the site may differ."""

    what: str
    site: str

    def __str__(self) -> str:
        return f"{self.what}, called at {self.site}"


running: list[ReplicaThreads] = []


def as_rank(fn: Callable[[], Any], job: dict[str, str], rank: int) -> Any:
    """``fn()`` in this thread, as ``rank`` of ``job``, with random numbers that are, unlike those of a real process,
    reproducible."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    settings.update({**job, **settings.of_rank(rank, running[-1].size)})
    swap_process([])
    device = f"xla:{rank}"
    _XLA._xla_set_default_device(device)
    _XLA._set_all_reduce_token(device, None)
    _HERE.rank = rank
    try:
        return fn()
    finally:
        _HERE.rank = None


def rank_here() -> int | None:
    """The rank of this thread; None outside of a run."""
    rank: int | None = getattr(_HERE, "rank", None)
    if rank is None and running and isinstance(threading.current_thread(), threading._DummyThread):
        # an autograd thread: each XLA device has one, and is its default device
        return int(_XLA._xla_get_default_device_ordinal())
    return rank


_TORCH_XLA = str(Path(torch_xla.__file__).parent) + os.sep


def _site() -> str:
    code, line = call_site(_TORCH_XLA)
    return f"{code.co_filename}:{line} in {code.co_name}"


def lowered(tensors: list[Tensor]) -> HloProgram:
    rank = rank_here()
    if rank is None:
        raise RuntimeError("lower() is called inside of run_replicas only")
    point = Point("lower", _site())
    return HloProgram(_same_program(rank, point, pending(tensors)), *point)


def programs_here() -> list[HloProgram]:
    """The programs that this thread's rank has run so far."""
    return list(running[-1].programs[rank_here() or 0])


def _meet(rank: int, point: Point, contribution: Any) -> list[Any]:
    """Wait for every rank to come here; return what each brings, in rank order."""
    world = running[-1]
    met = world.meet(tuple(range(world.size)), rank, point, contribution)
    others = [r for r, (there, _) in enumerate(met) if there.what != met[0][0].what]
    if others:
        lines = "\n".join(f"  rank {r} waits at {there}" for r, (there, _) in enumerate(met))
        raise CollectiveMismatchError(f"ranks 0 and {others[0]} do not come to the same point of the program:\n{lines}")
    return [brought for _, brought in met]


def _same_program(rank: int, point: Point, text: str) -> str:
    """The ``text`` of every rank's program; CollectiveMismatchError on all ranks if it differs."""
    texts = _meet(rank, point, text)
    differ = [r for r, program in enumerate(texts) if program != texts[0]]
    if not differ:
        return str(texts[0])
    first, other = texts[0].splitlines(), texts[differ[0]].splitlines()
    lines = difflib.unified_diff(first, other, "rank 0", f"rank {differ[0]}", lineterm="", n=0)
    shown = "\n".join(line[:200] for line in list(lines)[:_SHOWN])
    raise CollectiveMismatchError(
        f"ranks {differ} would run another program than rank 0 at {point.what} ({point.site}), "
        "so that their collectives never meet. A rank, or something computed from it, has become part of the "
        f"program; it must be data, as tpcore's comm.position is. The first lines that differ:\n{shown}"
    )


def _run(rank: int, what: str, dispatch: Callable[[], None], tensors: list[Tensor] | None = None) -> None:
    """Meet the other ranks, compare the programs, and start them one after the other."""
    site = _site()
    text = _same_program(rank, Point(what, site), pending(tensors))
    before = _compiled()
    dispatch()
    # No rank may go on before all have started: freeing a tensor that a started program still reads waits for
    # that program without releasing Python's lock.
    compiled = any(_meet(rank, Point(f"{what} started", site), _compiled() > before))
    running[-1].programs[rank].append(HloProgram(text, what, site, compiled))


def _compiled() -> int:
    return int(_XLA._xla_counter_value("UncachedCompile") or 0)


def install() -> None:
    """Patch torch and torch_xla until the process ends."""
    _patch_steps()
    for name in (*READS, "cpu", "__repr__", "__format__"):
        setattr(Tensor, name, preceded(getattr(Tensor, name), _meet_to_read))
    Tensor.to = preceded(Tensor.to, _meet_to_move)  # type: ignore[method-assign]
    for owner in (torch, Tensor):
        for name in _COMPARISONS:
            setattr(owner, name, preceded(getattr(owner, name), _meet_to_read))
    _patch_rendezvous()


def _patch_steps() -> None:
    step, multi = _XLA._xla_step_marker, _XLA._xla_sync_multi

    def step_marker(device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True) -> None:
        rank = rank_here()
        if rank is None:
            step(device, list(devices), wait=wait, reset_scope=reset_scope)
            return
        default = _XLA._xla_get_default_device()
        _run(rank, "sync", lambda: step(default, [], wait=False, reset_scope=reset_scope))
        if wait:
            _XLA._xla_wait_device_ops([])

    def sync_multi(
        tensors: Sequence[Tensor], devices: Sequence[str] = (), wait: bool = True, sync_xla_data: bool = True
    ) -> None:
        rank, some = rank_here(), list(tensors)
        pends = any(_XLA._check_tensor_need_materialization(some))
        alone = not pends or not _COLLECTIVE.search(_XLA._get_xla_tensors_text(some))
        if rank is None or alone:  # no collective is pending: a rank may read values without the others
            multi(some, list(devices), wait=wait, sync_xla_data=sync_xla_data)
            return
        _run(rank, "read", lambda: multi(some, list(devices), wait=False, sync_xla_data=sync_xla_data), some)
        if wait:
            _XLA._xla_wait_device_ops([])

    _XLA._xla_step_marker, _XLA._xla_sync_multi = step_marker, sync_multi


def _meet_to_read(t: Tensor, arguments: Sequence[Any]) -> None:
    if rank_here() is not None:
        others = [x for x in arguments if isinstance(x, Tensor) and x.device.type == "xla"]
        _XLA._xla_sync_multi([t, *others], [], wait=False, sync_xla_data=False)


def _meet_to_move(t: Tensor, arguments: Sequence[Any]) -> None:
    if leaves_device(arguments):
        _meet_to_read(t, [])


def _patch_rendezvous() -> None:
    original = xm.xla_rendezvous

    def xla_rendezvous(payload: bytes = b"", ordinals: Any = None, tag: str | None = None) -> list[bytes]:
        rank = rank_here()
        if rank is None:
            return list(original(payload, ordinals, tag))
        # torch_xla's own rendezvous gathers, with the rank as a constant of the program
        return _meet(rank, Point(f"rendezvous {tag!r}", _site()), payload)

    xm.xla_rendezvous = xla_rendezvous
