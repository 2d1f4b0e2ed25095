"""Starting ranks from Python: fresh processes, the root cause of a failure, nothing left behind."""

from __future__ import annotations

import ast
import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import programs as forked
from helpers.tiers import tiers

import tpcore
from tpcore import CheckpointError, PeerLostError
from tpcore.c10d.supervision.rendezvous import host_store
from tpcore.processes import launch as launching
from tpcore.processes.transfer import RankTraceback, pack_call

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("default_checks")]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    forked.context()
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


class Unlucky(Exception):
    """Not importable under this name where the test module is not: it must travel as it is."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(rank, what)
        self.rank = rank


def test_results_come_in_rank_order_and_errors_of_init_name_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/there is none")  # the call and the results are in memory
    offset = torch.tensor(10.0)

    def program(factor: int, *, power: int) -> tuple[float, list[str], str | None, str | None]:
        said = []
        for tp in (3, 4):
            with pytest.raises(ValueError, match=f"tp={tp} is larger than the world of 2") as e:
                tpcore.init("cpu_gloo", tp=tp)
            said.append(str(e.value))
        installed, other = tpcore.__version__, os.environ["RANK"] == "1"
        tpcore.settings.__version__ = "0.0.9" if other else installed
        with pytest.raises(ValueError, match=rf"rank 0 runs tpcore {installed} and rank 1 tpcore 0\.0\.9"):
            tpcore.init("cpu_gloo", tp=2)
        tpcore.settings.__version__ = installed
        ctx = tpcore.init("cpu_gloo", tp=2)  # refused calls leave nothing behind, here nor at the store
        with pytest.raises(RuntimeError, match="already initialized"):
            tpcore.init("cpu_gloo", tp=2)
        total = float(ctx.comm("tp").all_reduce(offset + ctx.rank)) * factor**power
        tpcore.shutdown()
        ctx = tpcore.init("cpu_gloo", tp=1)
        assert (ctx.comm("tp").size, ctx.comm("dp").size) == (1, 2)
        assert float(ctx.comm("dp").all_reduce(torch.ones(()))) == 2.0
        return total + ctx.rank, said, os.environ.get("OMP_NUM_THREADS"), os.environ.get("COLOUR")

    first, second = tpcore.launch(program, 2, args=(2,), kwargs={"power": 3}, env={"COLOUR": "green"})
    assert (first[0], second[0]) == (168.0, 169.0)
    assert first[1:] == second[1:]
    assert first[2:] == (os.environ["OMP_NUM_THREADS"], "green")


@pytest.mark.slow
def test_the_root_cause_is_raised_and_not_what_follows_from_it(capfd: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        ctx = tpcore.init("cpu_gloo", tp=2)
        if ctx.rank == 1:
            raise Unlucky(1, "no luck")
        ctx.comm("tp").all_reduce(torch.ones(2))

    with pytest.raises(Unlucky, match="no luck") as e:
        tpcore.launch(program)
    assert e.value.rank == 1
    assert isinstance(e.value.__cause__, RankTraceback)
    assert "rank 1:\nTraceback" in str(e.value.__cause__)
    assert "in program" in str(e.value.__cause__)
    said = capfd.readouterr().err
    assert "rank 1: Unlucky" in said
    assert "rank 0: PeerLostError: rank 1" in said
    assert "elastic" not in said


def test_a_killed_rank_is_named_and_the_callers_handlers_are_kept() -> None:
    def program() -> None:
        ctx = tpcore.init("cpu_gloo", tp=2)
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.comm("tp").all_reduce(torch.ones(2))

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(PeerLostError, match="rank 1 was killed by SIGKILL"):
        tpcore.launch(program)
    assert signal.getsignal(signal.SIGINT) is handler
    assert logging.getLogger("torch.distributed.elastic").propagate


SCRIPT = """
import os, sys
import torch, tpcore

print("this file runs once: below is no guard against a second time", flush=True)
folder = sys.argv[1]

def program():
    ctx = tpcore.init("cpu_gloo", tp=2)
    with open(f"{folder}/pids", "w") as told:
        told.write(f"{os.getpid()} ")
    for _ in range(200_000):  # longer than it takes to be ended, and not for ever if it is not
        ctx.comm("tp").all_reduce(torch.ones(1))

tpcore.launch(program, 2)
"""


@pytest.mark.parametrize("how", tiers([signal.SIGKILL], [signal.SIGINT]), ids=lambda s: s.name)
def test_ranks_end_with_their_parent(tmp_path: Path, how: signal.Signals) -> None:
    folder, script = tmp_path / "pids", tmp_path / "script.py"
    folder.mkdir()
    os.mkfifo(folder / "pids")
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    pids: list[str] = []
    told = os.open(folder / "pids", os.O_RDWR)  # no end of file between two ranks
    while len(pids) < 2:
        pids += os.read(told, 100).decode().split()
    os.close(told)
    ranks = [psutil.Process(int(pid)) for pid in pids]
    parent.send_signal(how)
    said = parent.communicate(timeout=60)[0]
    assert parent.returncode != 0
    assert ("KeyboardInterrupt" in said) == (how is signal.SIGINT)
    assert said.count("this file runs once") == 1
    assert not psutil.wait_procs(ranks, timeout=30)[1]


TRANSPARENT = """
import argparse, multiprocessing, os, pickle, sys
from concurrent.futures import ProcessPoolExecutor

class Item:
    def __init__(self, n): self.n = n

def double(item): return Item(2 * item.n)

calls = 0

def train(item, key):
    global calls
    calls += 1
    assert not calls, "python -O leaves this out"
    import __main__
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    options, rest = parser.parse_known_args()
    item = pickle.loads(pickle.dumps(item))
    for how in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(how)) as pool:
            item = pool.submit(double, item).result()
    same = multiprocessing.current_process().authkey == key
    names = __main__.Item is type(item), __main__.double is double, __main__.calls, same
    options_of_python = sys.flags.optimize, sys.warnoptions, sys._xoptions["own"], type(sys.stdout.buffer).__name__
    seen = options.lr, rest, sys.argv, os.getcwd(), __main__.__file__, __name__, multiprocessing.get_start_method()
    return item, names, options_of_python, seen

if __name__ == "__main__":
    import tpcore
    multiprocessing.set_start_method("spawn")
    key = bytes(multiprocessing.current_process().authkey)
    item, *seen = tpcore.launch(train, 1, args=(Item(5), key))[0]
    print([item.n, type(item) is Item, *seen])
"""


@pytest.mark.slow  # six interpreters
def test_a_function_sees_the_script_that_launches_it(tmp_path: Path) -> None:
    """Its arguments and options, its ``__main__``, and through it the workers that multiprocessing starts."""
    (tmp_path / "train.py").write_text(TRANSPARENT)
    options = ["-O", "-u", "-W", "error::UserWarning", "-X", "own=3"]
    words = [sys.executable, *options, "train.py", "--lr", "0.5", "/data/run1"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    limit = forked.PATIENCE
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    n, own, names, of_python, seen = ast.literal_eval(done.stdout)
    assert (n, own) == (20, True)
    assert names == (True, True, 1, True)
    assert of_python == (1, ["error::UserWarning"], "3", "FileIO")
    argv = ["train.py", "--lr", "0.5", "/data/run1"]
    assert seen == (0.5, ["/data/run1"], argv, str(tmp_path), str(tmp_path / "train.py"), "__main__", "spawn")


def test_a_script_that_a_worker_imports_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("__mp_main__"))
    with pytest.raises(RuntimeError, match=r"imports the script again.*put the call under if"):
        tpcore.launch(print, 1)


def test_what_cannot_be_started() -> None:
    with pytest.raises(TypeError, match="launch needs a function, not 3"):
        tpcore.launch(3)  # type: ignore[arg-type]
    for nprocs in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"nprocs must be a whole number of processes.*not {nprocs}"):
            tpcore.launch(print, nprocs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be sent to other processes"):
        tpcore.launch(print, args=(threading.Lock(),))


def test_without_cloudpickle_a_function_of_a_module_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    pack_call(os.path.join, ("a",), {})
    with pytest.raises(ValueError, match="pip install cloudpickle"):
        pack_call(lambda: None, (), {})


@pytest.mark.parametrize(("terminal", "said"), [(True, ["starting 1 rank"]), (False, [])])
def test_a_rank_that_ends_without_a_result_is_an_error(
    terminal: bool, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a terminal shows that it starts."""
    caplog.set_level(logging.INFO, "tpcore")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with pytest.raises(PeerLostError, match="rank 0 exited with status 0"):
        tpcore.launch(os._exit, 1, args=(0,))
    assert caplog.messages == said


def test_a_rank_that_fails_after_its_result_fails_the_job(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="rank 0 exited with status 7"):
        tpcore.launch(atexit.register, 1, args=(os._exit, 7))

    def program() -> str:
        ctx = tpcore.init("cpu_gloo", tp=2)

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        if ctx.rank == 1:
            tpcore.checkpoint.write.save.write_tensors = full
        tpcore.checkpoint.save({"model": {"w": torch.ones(3)}}, tmp_path / "saved", background=True)
        return "saved"

    with pytest.raises(CheckpointError, match=r"the save in the background failed: .*No space left"):
        tpcore.launch(program)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_killed_when_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        if os.environ["RANK"] == "1":
            raise OSError("disk on fire")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    monkeypatch.setattr(launching, "_GRACE", 0.1)
    monkeypatch.setattr(launching, "_PATIENCE", 0.1)
    with pytest.raises(OSError, match="disk on fire"):
        tpcore.launch(program)


def test_the_store_listens_on_loopback_alone() -> None:
    store, job = host_store()
    port = int(job["MASTER_PORT"])
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [at.ip for at in listening if at.port == port] == ["127.0.0.1"]
    assert not [at for at in listening if at.ip in ("0.0.0.0", "::")]
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", port, is_master=False).get("key") == b"value"
