"""A process that is forked after init makes no collective: it would take its parent's place."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from helpers.rank_pool import RankPool
from helpers.transports import each_road  # noqa: F401  the fixture ``pool``
from torch.utils.data import DataLoader, Dataset

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext, enter_process
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadWorld


def _shutdown(ctx: ParallelContext) -> None:
    enter_process(ctx)
    tpcore.shutdown()


CALLS: dict[str, Callable[[ParallelContext], object]] = {
    "a collective": lambda ctx: ctx.comm("tp").all_reduce(torch.full((2,), 100.0)),
    "one that starts": lambda ctx: ctx.comm("tp").start_all_reduce(torch.full((2,), 100.0)),
    "a new group": lambda ctx: ctx.comm("tp", "dp"),
    "shutdown": _shutdown,
    "a layer": lambda ctx: tpcore.RowParallelLinear(4, 4)(torch.ones(1, 4)),
}


def in_a_child(fn: Callable[[], object]) -> str:
    """What ``fn`` raises in a forked process."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            fn()
            os.write(writes, b"no error")
        except BaseException as e:  # noqa: BLE001  whatever it is, the child ends here
            os.write(writes, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.wait()
    with os.fdopen(reads) as file:
        return file.read()


class Squares(Dataset[int]):
    def __getitem__(self, i: int) -> int:
        return i * i

    def __len__(self) -> int:
        return 4


def _forks(ctx: ParallelContext) -> dict[str, str]:
    tp = ctx.comm("tp")
    said = {}
    for name, call in CALLS.items():
        tp.all_reduce(torch.ones(2))
        if ctx.rank == 0:
            said[name] = in_a_child(lambda call=call: call(ctx))  # type: ignore[misc]
        assert tp.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    assert in_a_child(lambda: tpcore.current().coord("tp")) == "no error"
    assert tp.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    return said


def test_a_child_is_refused_and_the_parent_goes_on(pool: RankPool) -> None:
    said = pool.run(Mesh({"dp": 1, "tp": 2}), _forks)[0]
    assert said.keys() == CALLS.keys()
    for text in said.values():
        assert text.startswith("BackendError: this process was forked from rank 0 after tpcore.init"), text


def test_on_threads() -> None:
    def check(ctx: ParallelContext) -> None:
        assert ctx.rank or "forked from rank 0" in in_a_child(lambda: CALLS["a collective"](ctx))

    run_ranks(Mesh({"dp": 1, "tp": 2}), check)


def test_workers_of_a_loader_need_no_collective() -> None:
    tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    try:
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9]]
    finally:
        tpcore.shutdown()
