"""Joining and leaving a job: alone, adopted, by hand, at an address of another job, and where it cannot work."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import programs as forked
from helpers.rank_pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tpcore
from tpcore.c10d.supervision.host import Identity
from tpcore.c10d.supervision.rendezvous import Rendezvous
from tpcore.c10d.supervision.supervisor import claim, job_ids, twice
from tpcore.errors import BackendError, CollectiveTimeoutError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore_cpu_gloo import GlooBackend

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, in an environment that no launcher has touched."""
    for name in (*VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return _port()


def _environment(monkeypatch: pytest.MonkeyPatch, *values: object) -> None:
    for name, value in zip(VARIABLES, values, strict=False):
        monkeypatch.setenv(name, str(value))


def test_alone(port: int) -> None:
    ctx = tpcore.init("cpu_gloo", tp=1)
    try:
        assert (ctx.rank, ctx.mesh.size, dist.get_world_size()) == (0, 1, 1)
        x = torch.ones(2, 2)
        tp = ctx.comm("tp")
        assert all(torch.equal(y, x) for y in (tp.all_reduce(x), tp.all_gather(x, 1), tp.broadcast(x, 0)))
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=ctx.comm("dp").process_group)
        model(x).sum().backward()
        assert model.module.weight.grad is not None
        listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening), "open to other machines"
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        with pytest.raises(RuntimeError, match="already initialized"):
            tpcore.init("cpu_gloo", tp=1)
    finally:
        tpcore.shutdown()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0,), r"\{'RANK': '0'\} is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (("", 2), r"\{'WORLD_SIZE': '2'\} is set, but not RANK"),
        ((2, 2, "127.0.0.1", 1), r"RANK=2 is outside WORLD_SIZE=2"),
        (("one", 2, "127.0.0.1", 1), r"RANK must be a whole number, not 'one'"),
        ((0, 2, "127.0.0.1", 0), r"MASTER_PORT=0 .*: torchrun --standalone, or"),
    ],
)
def test_half_an_environment(monkeypatch: pytest.MonkeyPatch, port: int, values: tuple[object, ...], said: str) -> None:
    _environment(monkeypatch, *values)
    with pytest.raises(BackendError, match=said):
        GlooBackend().start(1.0)


def test_a_rank_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    _environment(monkeypatch, 0, 3, "127.0.0.1", port)
    with pytest.raises(CollectiveTimeoutError, match="0 waited 1 s to start: rank 1, 2 of 3 did not come"):
        GlooBackend().start(1.0)
    assert not dist.is_initialized()


def test_a_store_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    _environment(monkeypatch, 1, 2, "127.0.0.1", port)
    with pytest.raises(CollectiveTimeoutError, match=f"1 waited 1 s for rank 0, .*:{port}"):
        GlooBackend().start(1.0)


def _adopt(ctx: ParallelContext) -> list[float]:
    sums = []
    for _ in range(2):  # again over one store, where the first time has left its traces
        backend = GlooBackend()
        rank, world = backend.start(20.0)
        assert (rank, world) == (ctx.rank, 4)
        comm = backend.comm(Mesh({"dp": 2, "tp": 2}).group("tp"), rank)
        sums.append(float(comm.all_reduce(torch.tensor(float(rank)))))
        backend.stop()
        assert dist.is_initialized(), "the program's own group is not ours to destroy"
        with pytest.raises(BackendError, match="used after"):
            comm.all_reduce(torch.ones(1))
    return sums


def test_a_default_group_of_the_program_is_adopted_and_left(pool: RankPool) -> None:
    assert pool.run(Mesh({"tp": 4}), _adopt) == [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0], [5.0, 5.0]]


BY_HAND = """
import os, torch, tpcore

ctx = tpcore.init("cpu_gloo", tp=2, timeout=30)
ctx.comm("tp").all_reduce(torch.ones(()))
if ctx.rank == 1:
    os.kill(os.getpid(), 9)
ctx.comm("tp").all_reduce(torch.ones(()))
"""
REAPED_AT_ONCE = """
import os, signal, subprocess, sys

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child of this process is ever a zombie
values = [dict(zip(sys.argv[2].split(","), (str(r), "2", "127.0.0.1", sys.argv[3]))) for r in range(2)]
for rank in [subprocess.Popen([sys.executable, sys.argv[1]], env=os.environ | v) for v in values]:
    rank.wait()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_whose_launcher_leaves_no_wait_status_is_named(tmp_path: Path, port: int) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    (tmp_path / "launcher.py").write_text(REAPED_AT_ONCE)
    words = ["python", "launcher.py", "train.py", ",".join(VARIABLES), str(port)]
    said = forked.run(words, tmp_path).stderr
    lines = [line for line in said.splitlines() if line.startswith("tpcore: rank 1 (pid")]
    assert [line.rpartition(") is gone")[2] for line in lines] == [" (killed, or ended by os._exit)"], said
    assert "PeerLostError: rank 1" in said


OWN = Identity.own()
DEAD = Identity(OWN.hostname, OWN.host, OWN.pid, OWN.started - 1)


FAR = Identity("elsewhere", "another host", 1, 1)


def held_by(who: Identity) -> dist.Store:
    store = dist.HashStore()
    store.set("tpcore/rank/1", json.dumps([astuple(who), "token"]))
    return store


@pytest.mark.parametrize("who", [OWN, DEAD, FAR], ids=["this process", "an ended one", "one that left, elsewhere"])
def test_a_place_may_be_taken_again(who: Identity) -> None:
    store = held_by(who)
    if who is FAR:
        store.set("tpcore/rank/0", json.dumps([astuple(OWN), "token"]))
        store.set("tpcore monitor token/end/1", "left the job (tpcore.shutdown)")
    claim(store, 1, OWN, "another", 1.0)
    assert json.loads(store.get("tpcore/rank/1")) == [list(astuple(OWN)), "another"]
    assert twice(store) is None


def test_a_place_of_a_living_process_is_refused_on_both_sides() -> None:
    store = held_by(FAR)
    with pytest.raises(BackendError, match=r"rank 1 has come twice, as pid 1 on elsewhere and as pid \d+"):
        claim(store, 1, OWN, "another", 1.0)
    assert re.search("has come twice", str(twice(store)))


def test_ids_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_HET_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert job_ids(2) == {"WORLD_SIZE": "2"}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job_ids(2) == {"WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert job_ids(2) == {"WORLD_SIZE": "2"}


def _rank(environment: dict[str, str], answers: Connection) -> None:
    os.environ.update(environment)
    if "TPCORE_TEST_READS_LATE" in environment:
        wait = Rendezvous._wait
        Rendezvous._wait = lambda *args: (wait(*args), time.sleep(1))  # type: ignore[method-assign]
    try:
        ctx = tpcore.init("cpu_gloo", tp=int(environment.get("TPCORE_TEST_TP", "2")), timeout=60)
        answers.send("started")
        while True:
            ctx.comm("tp").all_reduce(torch.ones(2))
    except (BackendError, ValueError) as e:
        answers.send(f"{type(e).__name__}: {e}")


def _started(port: int, rank: int, **more: str) -> tuple[Any, Connection]:
    methods = forked.context()
    mine, theirs = methods.Pipe()
    job = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = methods.Process(target=_rank, args=(job | more, theirs), daemon=True)
    process.start()
    return process, mine


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


@pytest.mark.processes
def test_started_by_hand_and_the_host_of_the_store_dies(port: int) -> None:
    ranks = [_started(port, rank) for rank in range(2)]
    assert [answers.recv() for _, answers in ranks] == ["started", "started"]
    ranks[0][0].kill()
    # gone: the server of the processes may have taken the wait status away
    assert re.match(r"PeerLostError: rank 0 \(pid \d+ on .*\) (was killed by SIGKILL|is gone)", ranks[1][1].recv())


@pytest.mark.processes
def test_ranks_that_ask_for_different_meshes_all_say_so(port: int) -> None:
    ranks = [_started(port, rank, TPCORE_TEST_TP=str(1 + rank)) for rank in range(2)]
    for _, answers in ranks:
        assert re.match(r"ValueError: rank 0 has the mesh .*'tp': 1\} and rank 1 has .*'tp': 2\}", answers.recv())


@pytest.mark.processes
def test_a_rank_that_comes_late_to_its_job_ends_both() -> None:
    port = _port()
    ranks = [_started(port, 0), _started(port, 1)]  # the second is of another job
    assert [answers.recv() for _, answers in ranks] == ["started", "started"]
    ranks.append(_started(port, 1))
    for process, answers in ranks:
        said = answers.recv()
        assert re.search(r"rank 1 has come twice to 127\.0\.0\.1:\d+, as pid \d+ .* MASTER_PORT of its own", said)
        process.join()


@pytest.mark.processes
def test_jobs_that_their_launchers_name_do_not_meet() -> None:
    port = _port()
    late = {"TPCORE_TEST_READS_LATE": "1"}  # rank 0, whose process has the store, waits for it
    ranks = [_started(port, 0, SLURM_JOB_ID="7"), _started(port, 1, SLURM_JOB_ID="8", **late)]
    for process, answers in ranks:
        said = answers.recv()
        assert said.startswith("ValueError: rank 0 has SLURM_JOB_ID=7 and rank 1 8: two jobs were given one address")
        process.join()


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_waits_for_others_keeps_nobody_from_being_told() -> None:
    port = _port()
    (first, told), (second, _) = (_started(port, rank, WORLD_SIZE=str(2 + rank)) for rank in (0, 1))
    assert told.poll(30)  # its time-out is 60 s
    assert told.recv().startswith("ValueError: rank 0 has WORLD_SIZE=2 and rank 1 3: two jobs were given one address")
    first.join()
    second.join()  # the store ended with the first
