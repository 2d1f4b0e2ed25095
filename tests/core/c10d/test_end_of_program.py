"""A program may end without tpcore.shutdown: no thread is in the middle of something when Python ends."""

from __future__ import annotations

import _thread
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from helpers import programs as forked

from tpcore.c10d.supervision.host import let_threads_finish

PROGRAM = """
import threading
import weakref

import torch
from torch import nn

import tpcore

ctx = tpcore.init("cpu_gloo", tp=2)
torch.manual_seed(0)
model = nn.Sequential(
    tpcore.ColumnParallelLinear(8, 16, gather_output=False),
    tpcore.RowParallelLinear(16, 8, input_is_parallel=True),
)
optimizer = tpcore.Zero1(torch.optim.AdamW, model.named_parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().sum().backward()
    tpcore.optimizer_step(optimizer)
tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, "saved", background=True)

# what takes microseconds, and would rarely be under way when the program ends, takes longer here: a report of
# the monitor, and the release of a tensor by gloo's thread
peers = ctx.backend._supervisor.peers
beat = peers._beat


def long_beat():
    beat()
    for _ in range(300):
        peers._store._get("never")


def long_release():
    releasing.set()
    for _ in range(3_000_000):
        pass


peers._beat, releasing = long_beat, threading.Event()
x = torch.ones(4)
weakref.finalize(x, long_release)
work = ctx.world.process_group._get_backend(torch.device("cpu")).allreduce([x])
del x, work
releasing.wait()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_that_simply_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ["torchrun", "--standalone", "--nproc_per_node=4", "train.py"]
    ended = forked.run(words, tmp_path, {**os.environ, "TPCORE_SHM": "0"})
    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr
    assert (tmp_path / "saved" / "manifest.json").is_file()


@pytest.mark.processes
def test_a_store_of_rank_0_outlasts_its_users(tmp_path: Path) -> None:
    """In any order of ends: what uses a store that is gone prints a stack trace of C++."""
    (tmp_path / "train.py").write_text("import tpcore\ntpcore.init('cpu_gloo', tp=2)\n")
    with socket.create_server(("127.0.0.1", 0)) as s:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor() as threads:
        one = partial(forked.run, ["python", "train.py"], tmp_path)
        ranks = [threads.submit(one, {**os.environ, **job, "RANK": str(rank)}) for rank in range(2)]
    for rank in ranks:
        assert (rank.result().returncode, rank.result().stderr) == (0, "")


def test_threads_that_need_the_interpreter_are_waited_for() -> None:
    """Threads that threading does not know, as those of a library."""
    begun, finished, asleep = threading.Event(), [], _thread.allocate_lock()
    asleep.acquire()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_some_library")
        begun.set()
        for _ in range(1_000_000):
            pass
        finished.append(True)
        with asleep:  # as a thread without work
            pass

    for _ in range(2):
        _thread.start_new_thread(work, ())
    begun.wait()
    start = time.monotonic()
    let_threads_finish("pt_some_library", 50.0)
    assert finished == [True, True]
    assert time.monotonic() - start < 50, "it waited for threads without work"
    asleep.release()
