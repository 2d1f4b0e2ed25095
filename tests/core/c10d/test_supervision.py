"""Whatever its transport, a backend over torch.distributed names lost ranks and mismatches."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import programs as forked
from helpers.rank_pool import RankPool
from test_c10d import Simple

from tpcore.c10d.supervision import fingerprints, rendezvous
from tpcore.c10d.supervision.host import Identity, Links, connections, sockets
from tpcore.c10d.supervision.peers import PeerMonitor
from tpcore.c10d.supervision.rendezvous import Rendezvous
from tpcore.c10d.supervision.status import FlightRecorder, RankReport, StatusStore
from tpcore.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext

TP2 = Mesh({"tp": 2})


class OtherTransport(Simple):
    """torch runs gloo for the CPU tensors of this one too; tpcore has not heard of its name."""

    transport = "cpu:gloo"


@pytest.fixture(scope="module")
def other() -> RankPool:
    with RankPool(2, backend=OtherTransport) as ranks:
        yield ranks


def _killed(ctx: ParallelContext) -> None:
    comm = ctx.comm("tp")
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(2))


def test_a_killed_rank_is_named(other: RankPool) -> None:
    error = other.outcomes(TP2, _killed)[0].error
    assert isinstance(error, PeerLostError)
    assert re.match(r"rank 1 \(pid \d+ on .*\) (was killed by SIGKILL|is gone)", str(error))
    assert "this rank's last collective: tp" in str(error), "from the flight recorder"


def test_a_rank_without_a_report_is_not_silent_since_1970() -> None:
    """The store cannot be reached: nothing is known of a rank on another host."""
    here = Identity.own()
    peers = PeerMonitor(
        StatusStore(dist.HashStore), 0, [here, Identity("far", "", 7, 7)], FlightRecorder(), Links({}, {})
    )
    assert peers.state(1, {1: RankReport()}) == " (pid 7 on far, of which no report has come)"
    assert re.match(r" \(pid 7 on far, no sign of life for \d+ s\)", peers.state(1, {1: RankReport(at=1.0)}))


def _other_words(ctx: ParallelContext) -> None:
    of_this_version = fingerprints.word_of
    fingerprints.word_of = lambda key: os.getpid()  # as another version would have it
    try:
        ctx.comm("tp").all_reduce(torch.ones(2))
    finally:
        fingerprints.word_of = of_this_version


def test_ranks_whose_words_differ_get_a_message(other: RankPool) -> None:
    for outcome in other.outcomes(TP2, _other_words):
        assert isinstance(outcome.error, CollectiveMismatchError)
        assert "but the calls are equal: #1 all_reduce sum" in str(outcome.error)
        assert "same versions" in str(outcome.error)


def _beats(ctx: ParallelContext) -> tuple[int, list[str]]:
    """Growth of the job's file in twenty beats, and what is beside it."""
    peers = ctx.backend._supervisor.peers  # type: ignore[attr-defined]
    ctx.world.all_reduce(torch.ones(1))
    store = Path(os.environ["TPCORE_STORE"])
    peers._ask(peers._beat, None)
    before = store.stat().st_size
    for _ in range(20):
        peers._ask(peers._beat, None)
    names = sorted(p.name for p in store.parent.glob("*.reports-*/*") if p.suffix != ".new")
    grown = store.stat().st_size - before
    ctx.world.all_reduce(torch.ones(1))  # a rank that ends says so in the file
    return grown, names


def test_signs_of_life_leave_a_file_store_as_large_as_it_is(other: RankPool) -> None:
    for grown, reports in other.run(TP2, _beats):
        assert grown == 0
        assert reports == ["0", "1"]


UNHANDLED = """
import os, signal, torch, tpcore
import torch.distributed as dist

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others, maybe before they have printed anything

ctx = tpcore.init("cpu_gloo", tp=2)
if ctx.rank == 1:
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(2))  # past tpcore: torch's excepthook prints the error, between prefixes
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_line_that_names_the_lost_rank_has_no_prefix_of_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPCORE_CHECK", raising=False)  # the ranks of checked runs import the compiler first
    (tmp_path / "train.py").write_text(UNHANDLED)
    printed = forked.run(["torchrun", "--standalone", "--nproc_per_node=2", "train.py"], tmp_path).stderr
    lines = [line for line in printed.splitlines() if "tpcore: rank 1 (pid" in line]
    assert lines, printed
    assert all(line.startswith("tpcore: ") for line in lines), printed


def _hooks(ctx: ParallelContext) -> str:
    return sys.excepthook.__qualname__


def test_our_hook_is_above_torchs(other: RankPool) -> None:
    assert other.run(TP2, _hooks) == ["PeerMonitor._excepthook"] * 2


def test_ranks_that_met_have_met_whatever_becomes_of_one_of_them() -> None:
    store = dist.HashStore()

    def lost(missing: Sequence[int]) -> PeerLostError:
        store.set("start/1", "here")  # between two looks at the store it came, met and failed
        return PeerLostError("rank 1 raised ValueError")

    assert Rendezvous(store, 0, 2, 60.0).meet("start", "here", lost) == ["here", "here"]


@pytest.mark.parametrize(("rank", "who"), [(0, "1, 2"), (1, "0")])
def test_ranks_that_are_not_started_again_are_named(rank: int, who: str) -> None:
    with pytest.raises(CollectiveTimeoutError, match=f"{rank} waited 0.1 s to start: rank {who} of 3 did not"):
        rendezvous._of_this_start(dist.HashStore(), rank, 3, 0.1)


def test_the_host_of_the_store_leaves_last() -> None:
    """A rank leaves when its main thread is in no meeting, and the host does not wait for one that has ended."""
    shared, meeting, alive = dist.HashStore(), [True], [1, 2]
    host, other = (StatusStore(lambda: shared, needed=lambda: bool(meeting)) for _ in range(2))
    host.open()
    other.open()
    other.make_way(1)
    assert not other.left
    thread = threading.Thread(target=host.outlast, args=(lambda: alive,), daemon=True)
    thread.start()
    shared.wait(["closing"])
    other.make_way(1)
    assert not other.left
    meeting.clear()
    other.make_way(1)
    assert other.left
    alive.remove(2)
    thread.join()
    assert shared.check(["left/1"])


def test_the_stores_connections_are_not_cut_with_the_groups() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = sockets()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as s:
        new = sockets() - before
        assert {os.fstat(x.fileno()).st_ino for x in (listener, s)} == new - {i for i, _ in connections(server.port)}
        assert len(new) == 4
    client.set("key", "value")
