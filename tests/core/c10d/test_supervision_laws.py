"""A few laws of supervision: words, reports, the store, hosts and starts, each by itself."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from tpcore.c10d.supervision import rendezvous
from tpcore.c10d.supervision.fingerprints import FingerprintExchange
from tpcore.c10d.supervision.host import GONE, Links, keep_alive
from tpcore.c10d.supervision.status import (
    FlightRecorder,
    RankReport,
    StatusStore,
    Verdict,
    connection_broke,
    timeout_report,
)
from tpcore.comm import signature as calls
from tpcore.errors import CollectiveTimeoutError, PeerLostError

HERE, THERE = ((f.__code__, 1, 0, 0) for f in (calls.word_of, calls.place_of))


def entry(seq: int, op: str = "all_reduce sum", shape: tuple[int, ...] = (2,), site: Any = HERE) -> Any:
    return None, seq, op, shape, torch.float32, site


def spoken(first: list[Any], second: list[Any]) -> tuple[Any, Any, tuple[bool, bool]]:
    """What each of two ranks finds differing once they have said these calls, and whether the second is late."""
    ends = [s for s in socket.socketpair() if s.setblocking(False) is None]
    pair = [FingerprintExchange((3, 5), i, {1 - i: ends[i]}, 4, False) for i in range(2)]
    for one, said in zip(pair, (first, second), strict=True):
        for e in said:
            one.say(e)
    for one in pair:
        one.read()
    found = [one.differing() for one in pair]
    late = not pair[0].arrived(True), not pair[0].arrived(False)
    for one in pair:
        one.close()
    return found[0], found[1], late


def test_what_two_ranks_say_differs_where_their_calls_do() -> None:
    same = [entry(1), entry(2, "broadcast 0")]
    assert spoken(same, same) == (None, None, (False, False))
    for other in (entry(1, "all_reduce max"), entry(1, shape=(3,)), entry(1, "all_gather dim 0")):
        first, second, _ = spoken([entry(1)], [other])
        assert (first[0], second[0]) == (entry(1), other)
    # swapped calls of one shape differ in their places alone
    first, second, _ = spoken([entry(1), entry(2, site=THERE)], [entry(1, site=THERE), entry(2)])
    assert first[1]
    assert second[1]
    assert spoken([entry(1)], [entry(1, site=THERE)])[:2] == (None, None)  # a branch is no mistake
    assert spoken([entry(1)], [])[2] == (True, False)  # waited for at once only where calls are checked first
    assert spoken([entry(i) for i in range(5)], [])[2] == (True, True)


def test_a_report_of_a_time_out_names_whom_all_wait_for() -> None:
    """The chain of waiting ranks is followed to its end, with what else is known of that rank."""
    group = {"0,1": 4, "1,2": 4}
    known = {
        0: RankReport(counts=group, waiting=(0, 1)),
        1: RankReport(counts={"0,1": 3, "1,2": 4}, waiting=(1, 2), at=1.0),
        2: RankReport(("last call",), {"1,2": 3}, at=1.0, stopped=(7,)),
    }
    text = timeout_report(0, (0, 1), 3.0, known, lambda r: " (stopped)" if r == 2 else "")
    assert "rank 0 waits for rank 1, which itself waits in group [1, 2]\n" in text
    assert "rank 1 waits for rank 2, which did not come (stopped)\n" in text
    assert "last call" in text
    assert RankReport.unpack(known[2].pack()) == known[2]
    recorder = FlightRecorder()
    assert recorder.last() == "no collective yet"
    all_there = {r: RankReport(counts={"0,1": 4}) for r in (0, 1)}
    assert "all came" in timeout_report(0, (0, 1), 3.0, all_there, lambda r: "")
    text = timeout_report(0, (0, 1), 3.0, all_there, lambda r: " (stopped)" if r == 1 else "")
    assert "rank 0 waits for rank 1, which came and did not finish (stopped)\n" in text
    assert "all came" not in text


def test_the_first_word_in_the_store_counts() -> None:
    """The first word on a rank's end and on the job's counts."""
    shared = dist.HashStore()
    first, second = (StatusStore(lambda: shared) for _ in range(2))
    for one in (first, second):
        one.open()
    assert first.post(Verdict("lost", "a")) == second.post(Verdict("lost", "b")) == Verdict("lost", "a")
    assert second.verdict() == Verdict("lost", "a")
    first.end(1, "raised")
    second.end(1, "left")
    assert second.ended(1) == "raised"
    assert first.ended(2) is None
    first.publish(0, RankReport(("x",), at=2.0))
    assert second.reports([0, 1]) == {0: RankReport(("x",), at=2.0)}
    assert isinstance(Verdict("timeout", "t").error("d"), CollectiveTimeoutError)
    assert isinstance(Verdict("lost", "t").error("d"), PeerLostError)
    broken = [RuntimeError("[gloo/transport/tcp/pair.cc:547] closed"), dist.DistBackendError("aborted")]
    others = [ValueError("x"), RuntimeError("shapes do not fit"), PeerLostError("rank 1, at transport/")]
    assert [connection_broke(error) for error in (*broken, *others)] == [True, True, False, False, False]


def test_a_connection_tells_a_lost_rank_from_a_lost_host() -> None:
    """Kernels probe; a closed connection is a lost rank, a silent one a lost host with all its ranks."""
    with socket.socket() as tcp:
        keep_alive(tcp, 8.0)
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        options = [getattr(socket, f"TCP_KEEP{name}") for name in ("IDLE", "INTVL", "CNT")]
        idle, every, count = (tcp.getsockopt(socket.IPPROTO_TCP, o) for o in options)
        assert 6 <= idle + every * count <= 8
    near, far = socket.socketpair()
    known = Links({}, {"127.0.0.1": [2, 3], "127.0.0.9": [4]}, 8.0)
    known._sockets[2] = near
    far.close()
    assert not known.end(2)
    assert known.fates == {2: GONE}
    known._sockets[3] = _Silent()
    assert known.end(3)
    assert "rank 3 is there too" in known.fates[2]
    assert "rank 2 is there too" in known.fates[3]
    assert 4 not in known.fates
    assert known.lose("127.0.0.7") is None


class _Silent(socket.socket):
    def recv(self, size: int, flags: int = 0) -> bytes:
        raise TimeoutError(110, "Connection timed out")


def test_ranks_of_one_start_meet_whatever_earlier_ones_left() -> None:
    """Ranks that are started together meet, whatever earlier ones have left."""
    shared = dist.HashStore()
    shared.set("tpcore start/1", json.dumps("of a rank that was killed"))
    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            made = [threads.submit(rendezvous._of_this_start, shared, r, 3, 2.0) for r in range(3)]
        assert sorted(m.result().add("ranks", 1) for m in made) == [1, 2, 3]
