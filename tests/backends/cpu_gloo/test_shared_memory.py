"""Shared memory between ranks: which group takes it, what ends leave behind, and that each rule is needed."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.endings import ENDS, STEPS, Tiny, ends_at, names, said
from helpers.rank_pool import RankPool

from tpcore.c10d.supervision.status import Verdict
from tpcore.c10d.supervision.waiting import Waiting
from tpcore.comm.comm import Comm
from tpcore.errors import CollectiveMismatchError, PeerLostError
from tpcore.layers import ContextParallelAttention, ring
from tpcore.layout.mesh import Mesh
from tpcore.processes.transfer import nameless_file
from tpcore.runtime.context import ParallelContext
from tpcore_cpu_gloo import GlooBackend, segment
from tpcore_cpu_gloo.exchange import Announced, Exchange

TP2, TP4 = Mesh({"tp": 2}), Mesh({"tp": 4})


@pytest.fixture(scope="module")
def tiny() -> Iterator[RankPool]:
    with RankPool(4, backend=Tiny) as ranks:
        yield ranks


# -- the choice ---------------------------------------------------------------------------------------------
def _roads(ctx: ParallelContext) -> list[str]:
    return [repr(ctx.comm(axis).transport) for axis in ctx.mesh.axes]


def _context(ctx: ParallelContext) -> str:
    ctx.comm("tp")
    return repr(ctx)


def test_ranks_of_one_host_share_memory_without_a_name_unless_told_not_to(pool: RankPool) -> None:
    before = set(os.listdir("/dev/shm"))
    assert pool.run(Mesh({"dp": 2, "tp": 2}), _roads) == [["shared memory"] * 2] * 4
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "tpcore" in name}
    assert pool.run(TP2, _context)[0] == "ParallelContext(GlooBackend, Mesh({'tp': 2}), rank 0; tp: shared memory)"
    told = ["gloo (rank 0: TPCORE_SHM=0; rank 1: TPCORE_SHM=0)"]
    assert pool.run(TP2, _roads, env={"TPCORE_SHM": "0"}) == [told] * 2


def _one_has_no_memory(ctx: ParallelContext) -> tuple[list[str], float, int]:
    gc.collect()  # an earlier job's, which would be closed in the middle of this one
    files, before = len(_memory_files()), resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == 1:  # the kernel refuses to make a file larger, in memory too
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        roads = _roads(ctx)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return roads, float(ctx.comm("tp").all_reduce(torch.ones(()))), len(_memory_files()) - files


def _memory_files() -> list[str]:
    return [f for f in os.listdir("/proc/self/fd") if _target(f).startswith("/memfd:tpcore")]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _without_memfd(ctx: ParallelContext) -> tuple[str, float]:
    """As where Python was built without it."""
    create = os.__dict__.pop("memfd_create")
    try:
        comm = ctx.backend.comm(ctx.mesh.group("tp"), ctx.rank)
        return repr(comm.transport), float(comm.all_reduce(torch.ones(100_000)).sum())
    finally:
        os.memfd_create = create


def test_a_python_without_memfd_create_shares_files_without_a_name(pool: RankPool) -> None:
    assert pool.run(TP2, _without_memfd) == [("shared memory", 200_000.0)] * 2


def _short(ctx: ParallelContext) -> list[str]:
    """Rank 1's file is shorter than it says, which is a ValueError of ``mmap``."""
    real = segment.Segment.open

    def cut(self: Any, tickets: Any) -> None:
        if ctx.rank == 1:
            self._length *= 2
        real(self, tickets)

    segment.Segment.open = cut  # type: ignore[method-assign]
    try:
        return [repr(ctx.backend.comm(ctx.mesh.group("tp"), ctx.rank).transport)]
    finally:
        segment.Segment.open = real  # type: ignore[method-assign]


def test_a_mapping_that_fails_keeps_the_group_on_gloo(pool: RankPool) -> None:
    for roads in pool.run(TP2, _short):
        assert re.fullmatch(r"gloo \(rank 1: mmap length is greater than file size\)", roads[0])


def test_memory_is_of_this_user_alone_and_cannot_become_shorter() -> None:
    fd = nameless_file()
    os.ftruncate(fd, 8192)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_one_rank_without_memory_keeps_all_of_its_group_on_gloo(pool: RankPool) -> None:
    for roads, total, files in pool.run(TP4, _one_has_no_memory):
        assert re.fullmatch(r"gloo \(rank 1: .*File too large.*\)", roads[0])
        assert (total, files) == (4.0, 0)


class Lean(GlooBackend):
    """Rank 1 gets no more memory than at first."""

    buffers = (64, 1024)

    def _share_memory(self, pg: object, waiting: Waiting) -> Exchange | str:
        road = super()._share_memory(pg, waiting)
        if isinstance(road, Exchange) and self._rank == 1:
            os.close(road.segment._own)
            road.segment._own = os.open("/dev/null", os.O_RDONLY)  # which cannot be reserved
        return road


def _grown(ctx: ParallelContext) -> tuple[float, int]:
    comm = ctx.comm("tp")
    total = comm.all_reduce(torch.ones(1000)).sum()
    total += comm.all_reduce(torch.ones(1000)).sum()
    return float(total), comm.transport._segment.room  # type: ignore[attr-defined]


def test_buffers_grow_as_far_as_all_have_memory(pool: RankPool) -> None:
    with RankPool(2, backend=Tiny) as tiny, RankPool(2, backend=Lean) as lean:
        assert tiny.run(TP2, _grown) == [(4000.0, 256)] * 2
        assert lean.run(TP2, _grown) == [(4000.0, 64)] * 2


# -- the ends -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(  # each once; helpers.lost_ranks: each with each
    ("how", "world", "step"), [*zip(ENDS, (2, 4, 2, 4, 2), cycle(STEPS["shared memory"]), strict=False)]
)
def test_a_rank_that_ends_at_any_step_is_named(tiny: RankPool, tmp_path: Path, how: str, step: str, world: int) -> None:
    outcomes = tiny.outcomes(Mesh({"tp": world}), ends_at, how, step, str(tmp_path))
    for outcome in outcomes[:-1]:
        assert outcome.error is None
        text, _ = outcome.value  # tests/helpers/lost_ranks.py measures the seconds; a time-out says other words
        assert names(text, world - 1, how), text


def _forks(ctx: ParallelContext) -> list[float]:
    comm, out = ctx.comm("tp"), []
    for _ in range(3):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        out.append(float(comm.all_reduce(torch.ones(()))))
    return out


def test_a_fork_changes_nothing(pool: RankPool) -> None:
    assert pool.run(TP2, _forks) == [[2.0] * 3] * 2


def _waits(ctx: ParallelContext) -> tuple[float, float]:
    """Seconds of the clock and of the processor that a sum takes which rank 1 comes to a second late."""
    comm = ctx.comm("tp")
    comm.all_reduce(torch.ones(4))
    began, used = time.monotonic(), time.process_time()
    if ctx.rank == 1:
        time.sleep(1.0)
    comm.all_reduce(torch.ones(4))
    return time.monotonic() - began, time.process_time() - used


def test_a_rank_that_waits_uses_no_processor(pool: RankPool) -> None:
    waited, used = pool.run(TP2, _waits)[0]
    assert used < waited / 5  # 0.005 to 0.007 of it were seen, the monitor's thread among them


def test_looks_become_rarer_where_no_sleep_can_be_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, pauses = ctypes.create_string_buffer(segment.STRIDE), list[float]()
    address = ctypes.addressof(memory)
    segment._create(address, 0, 0)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            segment.post_to(address)

    monkeypatch.setattr(segment, "_clockwait", None)
    monkeypatch.setattr(time, "sleep", pause)
    assert segment.sleep_on(address, 60.0)
    assert (pauses[0], pauses[-1]) == (5e-5, 1e-3)
    assert pauses == sorted(pauses)


# -- a permute under way ------------------------------------------------------------------------------------
def _computes_first(ctx: ParallelContext, pipe: str) -> list[float]:
    """Rank 1 comes to its ring only when rank 0 has computed a block of it: rank 0 waits for no one before."""
    attention = ContextParallelAttention("ring", context_parallel_group=ctx.comm("tp"))
    kernel, computed = ring._kernel, 0

    def computes(*arguments: Any, **options: Any) -> Any:
        nonlocal computed
        found = kernel(*arguments, **options)
        if turn and ctx.rank == 0 and not computed:
            os.close(os.open(pipe, os.O_WRONLY))  # until rank 1 reads
        computed += 1
        return found

    errors = []
    for turn in range(2):  # in the first, buffers become as large as a block
        whole = [torch.randn(1, 2, 32, 4, generator=torch.Generator().manual_seed(i + 3 * turn)) for i in range(3)]
        if turn and ctx.rank == 1:
            Path(pipe).read_text()
        computed, ring._kernel = 0, computes
        try:
            out = attention(*(attention.order.cut(t, 2) for t in whole))
        finally:
            ring._kernel = kernel
        want = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        errors.append(float((out - attention.order.cut(want, 2)).abs().max()))
    return errors


def test_a_rank_computes_before_its_neighbour_has_come(tiny: RankPool, tmp_path: Path) -> None:
    """Its keys, 16 pieces, are where the neighbour takes them when it comes."""
    os.mkfifo(tmp_path / "pipe")
    for errors in tiny.run(TP2, _computes_first, str(tmp_path / "pipe"), timeout=30.0):
        assert max(errors) < 1e-5  # float32, in another order


def _larger_than_is_posted(ctx: ParallelContext) -> list[tuple[float, int]]:
    comm, found = ctx.comm("tp"), []
    for n in (1000, 10_000):  # of which Tiny posts 4096 at most
        got = comm.start_permute(torch.arange(float(n)) + ctx.rank, [1, 0])()
        found.append((float((got - torch.arange(float(n))).unique()), comm.transport._segment.room))  # type: ignore[attr-defined]
    got = comm.all_gather(torch.arange(1000.0), 0)  # in pieces as small as before
    return [*found, (float((got.view(2, -1) - torch.arange(1000.0)).abs().max()), 0)]


def test_a_block_is_posted_whole_up_to_64_pieces(tiny: RankPool) -> None:
    for rank, found in enumerate(tiny.run(TP2, _larger_than_is_posted)):
        assert found == [(1.0 - rank, 4096), (1.0 - rank, 64 * 256), (0.0, 0)]


# -- calls that differ --------------------------------------------------------------------------------------
def _differ(ctx: ParallelContext, large: int) -> list[str]:
    comm, out = ctx.comm("tp"), []
    odd = ctx.rank == ctx.mesh.size - 1
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(torch.ones(3 if odd else large)),
        lambda: comm.all_gather(torch.ones(2, 2), 1 if odd else 0),
        lambda: comm.permute(torch.ones(2), [*range(comm.size)] if odd else [*range(1, comm.size), 0]),
        lambda: comm.all_reduce(torch.ones(0)) if odd else comm.broadcast(torch.ones(large), 0),
        lambda: _two(comm, 5 if odd else 4),
    ]
    for call in calls:
        out.append(said(CollectiveMismatchError, call))
        out.append(str(float(comm.all_reduce(torch.ones(())))))  # the group is in step again
    return out


def _two(comm: Comm, n: int) -> object:
    first, second = comm.start_all_reduce(torch.ones(4)), comm.start_all_reduce(torch.ones(n))
    return first(), second()


@pytest.mark.parametrize(("check", "world", "large"), [("1", 2, 4), ("0", 4, 1000)])  # whole, and in pieces
def test_calls_that_differ_are_named_and_the_group_goes_on(tiny: RankPool, large: int, check: str, world: int) -> None:
    every = tiny.run(Mesh({"tp": world}), _differ, large, env={"TPCORE_CHECK": check})
    for texts in every:
        assert texts == every[0]
        assert texts[1::2] == [f"{world}.0"] * 5
        for text in texts[::2]:
            assert f"ranks 0 and {world - 1} of group" in text
            assert text.count(" at ") == 2


def _parts_in_a_loop(ctx: ParallelContext) -> int:
    """The calls that gave a right sum, before rank 1 has left and its program goes on."""
    comm, right = ctx.comm("tp"), 0
    exchange = comm.transport._exchange  # type: ignore[attr-defined]
    with suppress(PeerLostError):
        for n in range(1, 100):
            if n == 50 and ctx.rank == 1:
                exchange.waiting._peers.post(Verdict("lost", "rank 1 is told to leave"))
                exchange._leave()  # as the monitor's thread does, at any moment
            right += comm.all_reduce(torch.full((4,), float(n))).tolist() == [2.0 * n] * 4
    return right - n


def test_a_rank_that_leaves_in_the_middle_of_its_calls_gives_no_sum_of_older_values() -> None:
    with RankPool(2, backend=Tiny) as ranks:
        outcomes = ranks.outcomes(TP2, _parts_in_a_loop)
    assert [o.value for o in outcomes] == [-1, -1]  # every call was right but the one that raised


# -- a reader that is late ----------------------------------------------------------------------------------
class Late(Exchange):
    """Rank 1 reads its peer's buffer only when that has filled the next, or surely will not."""

    def take(self, call: Announced) -> None:
        value, peek = ctypes.c_int(), ctypes.CDLL(None).sem_getvalue
        for _ in range(20_000 if self.segment.position == 1 else 0):
            peek(ctypes.c_void_p(self.segment.waits[0][1]), ctypes.byref(value))
            if value.value >= 2:
                break
            os.sched_yield()
        super().take(call)


class ReadsLate(Tiny):
    def _share_memory(self, pg: object, waiting: Waiting) -> Exchange | str:
        road = super()._share_memory(pg, waiting)
        if isinstance(road, Exchange):
            road.__class__ = Late
        return road


def _sums(ctx: ParallelContext) -> list[str]:
    """What is wrong with collectives over two groups of the same ranks, which share one segment."""
    comms, wrong = [ctx.comm("tp"), ctx.comm("dp", "tp")], []
    for i in range(8):
        got = comms[i % 2].all_gather(torch.full((4,), float(10 * i + ctx.rank)), 0).tolist()
        if got != [10.0 * i] * 4 + [10.0 * i + 1] * 4:
            wrong.append(f"call {i} gave {got}")
    return wrong


def test_a_late_reader_finds_what_was_sent() -> None:
    """Without two buffers, or with a turn for each group of a segment, it would find the next call's."""
    with RankPool(2, backend=ReadsLate) as ranks:
        assert ranks.run(Mesh({"dp": 1, "tp": 2}), _sums, env={"TPCORE_CHECK": "0"}) == [[], []]
