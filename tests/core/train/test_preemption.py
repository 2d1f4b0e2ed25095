"""Signals of schedulers: one step for all ranks, whichever of them was told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.rank_pool import RankPool

import tpcore
from tpcore import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadWorld


def _told(ctx: ParallelContext, signals: tuple[int, ...], every: int, sent: int) -> tuple[list[bool], int, bool]:
    before = signal.getsignal(sent)
    asked = []
    with tpcore.Preemption(*signals, every=every) as preemption:
        for step in range(5):
            if step == 1 and ctx.rank == 1:
                os.kill(os.getpid(), sent)
            asked.append(preemption.requested())
    return asked, preemption.number, signal.getsignal(sent) == before


@pytest.mark.parametrize(
    ("signals", "every", "sent", "first"),
    [((), 1, signal.SIGTERM, 1), ((), 3, signal.SIGTERM, 2), ((signal.SIGUSR1, signal.SIGTERM), 1, signal.SIGUSR1, 1)],
)
def test_all_ranks_learn_at_one_step(
    pool: RankPool, signals: tuple[int, ...], every: int, sent: int, first: int
) -> None:
    for asked, number, restored in pool.run(Mesh({"dp": 2, "tp": 1}), _told, signals, every, sent):
        assert asked == [step >= first for step in range(5)]
        assert (number, restored) == (sent, True)


def test_refused() -> None:
    with pytest.raises(ValueError, match="every=0: a number of calls, 1 or more"):
        tpcore.Preemption(every=0)

    def rank(_: ParallelContext) -> None:
        assert threading.current_thread() is not threading.main_thread()
        with pytest.raises(ValueError, match=r"main thread alone; start ranks as processes, with tpcore\.launch"):
            tpcore.Preemption().__enter__()

    run_ranks(Mesh({"tp": 2}), rank)


def test_what_is_told_otherwise_needs_no_main_thread() -> None:
    """As in Ray's workers: one rank is told, after three steps, and all stop at one."""

    def rank(ctx: ParallelContext) -> tuple[list[bool], int]:
        assert threading.current_thread() is not threading.main_thread()
        steps = iter(range(9))
        with tpcore.Preemption(told=lambda: ctx.rank == 1 and next(steps) >= 2) as preemption:
            asked = [preemption.requested() for _ in range(5)]
        return asked, preemption.number

    assert run_ranks(Mesh({"tp": 2}), rank) == [([False, False, True, True, True], signal.SIGTERM)] * 2


def test_a_process_leaves_with_the_status_of_its_signal() -> None:
    tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    with tpcore.Preemption() as preemption:
        assert not preemption.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested()
        with pytest.raises(SystemExit) as left:
            preemption.leave()
    assert left.value.code == 143
    assert not tpcore.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SCRIPT = """
import sys, time
import torch, tpcore
from pathlib import Path

def train():
    ctx = tpcore.init(backend="cpu_gloo", tp=2)
    model = tpcore.ColumnParallelLinear(2, 2)
    with tpcore.Preemption() as preemption:
        for step in range(10**9):
            ctx.world.all_reduce(torch.ones(1))
            if step == 20 and ctx.rank == 0:
                print("trains", flush=True)
            if preemption.requested():
                time.sleep(6)  # longer than a launcher waits for ranks of a job that failed
                tpcore.checkpoint.save({"model": model.state_dict(), "step": step}, "saved", background=True)
                Path(f"rank{ctx.rank}").write_text(str(step))
                preemption.leave()

if __name__ == "__main__":
    if "LAUNCH" in sys.argv:
        tpcore.launch(train, 2)
    else:
        train()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "status"),
    [(["train.py", "LAUNCH"], 143), (["-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"], None)],
    ids=["launch", "torchrun"],
)
def test_the_launcher_is_told_to_end(command: list[str], status: int | None, tmp_path: Path) -> None:
    """Ranks save at one step before it ends: by ``launch`` with status 143, by torchrun with one of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "trains\n"
        job.terminate()
        code = job.wait(120)
    assert code == status if status is not None else code != 0
    steps = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] >= 20
    tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    assert tpcore.checkpoint.load(tmp_path / "saved", tpcore.ColumnParallelLinear(2, 2))["step"] == steps[0]
    tpcore.shutdown()
