"""Two jobs that were given one address do not mix: a rank number that comes twice ends both."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import astuple
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

import tpcore
from tpcore import BackendError
from tpcore.c10d.supervision.host import Identity
from tpcore.c10d.supervision.rendezvous import Rendezvous
from tpcore.c10d.supervision.supervisor import claim, job_ids, twice
from tpcore.layout.mesh import Mesh

OWN = Identity.own()
DEAD = Identity(OWN.hostname, OWN.host, OWN.pid, OWN.started - 1)


def held_by(who: Identity) -> dist.Store:
    store = dist.HashStore()
    store.set("tpcore/rank/1", json.dumps([astuple(who), "token"]))
    return store


@pytest.mark.parametrize("who", [OWN, DEAD], ids=["this process", "an ended one"])
def test_a_place_may_be_taken_again(who: Identity) -> None:
    store = held_by(who)
    claim(store, 1, OWN, "another", 1.0)
    assert json.loads(store.get("tpcore/rank/1")) == [list(astuple(OWN)), "another"]
    assert twice(store) is None


def test_a_place_of_a_living_process_is_refused_on_both_sides() -> None:
    store = held_by(Identity("elsewhere", "another host", 1, 1))
    with pytest.raises(BackendError, match=r"rank 1 has come twice, as pid 1 on elsewhere and as pid \d+"):
        claim(store, 1, OWN, "another", 1.0)
    assert re.search("has come twice", str(twice(store)))


def test_a_place_that_was_left_may_be_taken_from_another_host() -> None:
    store = held_by(Identity("elsewhere", "another host", 1, 1))
    store.set("tpcore/rank/0", json.dumps([astuple(OWN), "token"]))
    store.set("tpcore monitor token/end/1", "left the job (tpcore.shutdown)")
    claim(store, 1, OWN, "another", 1.0)
    assert twice(store) is None


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
        ctx = tpcore.init("cpu_gloo", tp=2, timeout=60)
        answers.send("started")
        while True:
            ctx.comm("tp").all_reduce(torch.ones(2))
    except (BackendError, ValueError) as e:
        answers.send(str(e))


def _started(port: int, rank: int, **more: str) -> tuple[Any, Connection]:
    methods = get_context("forkserver")
    methods.set_forkserver_preload(["torch", "tpcore"])
    mine, theirs = methods.Pipe()
    job = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = methods.Process(target=_rank, args=(job | more, theirs), daemon=True)
    process.start()
    return process, mine


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


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
        assert answers.recv().startswith("rank 0 has SLURM_JOB_ID=7 and rank 1 8: two jobs were given one address")
        process.join()


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_waits_for_others_keeps_nobody_from_being_told() -> None:
    port = _port()
    (first, told), (second, _) = (_started(port, rank, WORLD_SIZE=str(2 + rank)) for rank in (0, 1))
    assert told.poll(30)  # its time-out is 60 s
    assert told.recv().startswith("rank 0 has WORLD_SIZE=2 and rank 1 3: two jobs were given one address")
    first.join()
    second.join()  # the store ended with the first


def _alone(ctx: tpcore.ParallelContext) -> int:
    return int(ctx.comm("tp").all_reduce(torch.ones(1)).item())


def test_a_pool_starts_again_at_its_stores(pool: RankPool) -> None:
    assert [pool.run(Mesh({"tp": 2}), _alone) for _ in range(2)] == [[2, 2], [2, 2]]
