"""A traced model is called like the original, and what befalls its processes is told and leaves nothing."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import programs as forked
from helpers.tiers import tiers
from models import VOCABULARY, Encoder, batch, differences, error_of

import tpcore
from tpcore.errors import BackendError, CheckpointError, PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.settings import HUGE_PAGES, changed
from tpcore.testing import run_ranks
from tpcore.trace import TensorParallelModel, parallel_model_load, parallel_model_save
from tpcore.trace.serve.model import Turn

pytestmark = pytest.mark.usefixtures("default_checks")
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
EXACT = 1e-12  # float64: another order of summation and nothing else


def plain(seed: int = 0) -> Encoder:
    return Encoder(False, seed).eval().requires_grad_(False)


def pids(model: TensorParallelModel) -> list[int]:
    return [p.pid for p in model._workers._processes.all]


def gone(numbers: list[int]) -> bool:
    """Whether all of these processes have ended, or do so within the time that a kill takes."""
    for n in numbers:
        try:
            ended = os.pidfd_open(n)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([ended], [], [], 20)
        os.close(ended)
        if not ready:
            return False
    return True


def quick(test: str, params: Mapping[str, Any]) -> bool:
    """Each way to end a program by itself starts three interpreters."""
    return test != "test_a_plain_program_that_has_not_the_models_code"


def test_calls_are_the_original_ones(served: TensorParallelModel) -> None:
    for rows, length in ((1, 8), (4, 33)):
        ids, mask = batch(rows, length)
        assert differences(served(ids, mask), plain()(ids, mask)) < EXACT
        assert differences(served(mask=mask, ids=ids.t().contiguous().t()), plain()(ids, mask)) < EXACT
    first = served(ids, mask)["logits"].clone()
    kept = served(ids, mask)["logits"]
    served(*batch(2, 9))
    assert torch.equal(kept, first)  # outputs are the caller's own
    assert len(served.rank_seconds) == served.tp_degree == 2
    assert "ids [rows, length]" in repr(served)


def _mapped(model: TensorParallelModel) -> list[set[str]]:
    """Whose files of weights each rank maps."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids(model)]
    return [set(re.findall(r"tp_rank_\d(?=/model.safetensors)", text)) for text in maps]


def test_a_host_holds_once_what_all_ranks_have(artifact: Path, served: TensorParallelModel) -> None:
    """From the first rank's file; of the others each rank has a copy in huge pages, unless it is told not to."""
    assert _mapped(served) == [{"tp_rank_0"}] * 2
    with changed({HUGE_PAGES.name: "0"}), parallel_model_load(artifact, timeout=60) as model:
        assert _mapped(model) == [{"tp_rank_0"}, {"tp_rank_0", "tp_rank_1"}]
        assert error_of(model, 2, 8) < EXACT


def test_threads_are_served_in_their_order(served: TensorParallelModel) -> None:
    wrong: list[Any] = []
    want = {n: plain()(*batch(n, 8)) for n in range(1, 9)}

    def ask(n: int) -> None:
        for _ in range(20):
            if differences(served(*batch(n, 8)), want[n]) > EXACT:
                wrong.append(n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert wrong == []
    assert not any(t.is_alive() for t in threads)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(*batch(9, 8)), ValueError, r"no program takes ids \[9, 8\], mask \[9, 8\]; the model was"),
        (lambda m: m(*batch(1, 8), nope=1), TypeError, "unexpected keyword argument 'nope'"),
        (
            lambda m: m(batch(1, 8)[0] + VOCABULARY, batch(1, 8)[1]),
            IndexError,
            r"id does not fit a vocabulary of \d+: ids has 3\d to .*; an embedding of n rows",
        ),
        (lambda m: m(batch(1, 8)[0].to("meta"), batch(1, 8)[1]), TypeError, "ids is on meta, without values"),
        (lambda m: m(batch(1, 8)[0], batch(1, 8)[1].to_sparse()), TypeError, r"mask is torch\.sparse_coo"),
        (lambda m: m(NESTED, batch(1, 8)[1]), TypeError, "ids is a nested tensor: pad it to one size"),
        (lambda m: m.train(), RuntimeError, "computes outputs only"),
        (copy.deepcopy, TypeError, "cannot be copied"),
        (pickle.dumps, TypeError, "parallel_model_save writes it"),
        (lambda m: parallel_model_save(plain(), "x"), TypeError, "takes what parallel_model_trace returned"),
    ],
)
def test_what_a_caller_does_wrong_changes_nothing(
    served: TensorParallelModel, call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(served)
    assert error_of(served, 2, 8) < EXACT


def _save_at_4(folder: Path) -> None:
    def save(ctx: Any) -> None:
        tpcore.checkpoint.save(Encoder(True, seed=3).state_dict(), folder)

    run_ranks(Mesh({"tp": 4}), save)


@pytest.mark.slow
def test_weights_are_replaced(artifact: Path, tmp_path: Path) -> None:
    """From a checkpoint at another degree, a file, and a dict; a bad one changes nothing; saved with them."""
    _save_at_4(tmp_path / "sharded")
    torch.save(plain(4).state_dict(), tmp_path / "whole.pt")
    with parallel_model_load(artifact) as model:
        for source, seed in ((tmp_path / "sharded", 3), (str(tmp_path / "whole.pt"), 4), (plain(5).state_dict(), 5)):
            model.replace_weights(source)
            assert error_of(model, 2, 8, seed) < EXACT
        small = Encoder(False, hidden=8).state_dict()
        with pytest.raises(CheckpointError, match=r"'places.weight'.*\(64, 8\).*\(64, 16\)"):
            model.replace_weights(small)
        with pytest.raises(CheckpointError, match="nowhere"):
            model.replace_weights(tmp_path / "nowhere")
        assert error_of(model, 2, 8, 5) < EXACT
        parallel_model_save(model, tmp_path / "saved")
        os.kill(pids(model)[0], signal.SIGKILL)
        model.restart = True
        with pytest.raises(PeerLostError):
            model(*batch(2, 8))
        assert error_of(model, 3, 8, 5) < EXACT  # not the inputs that were sent last
    with parallel_model_load(tmp_path / "saved", verify=True) as model:
        assert error_of(model, 2, 8, 5) < EXACT


@pytest.mark.parametrize("rank", tiers([1], [0]))
def test_a_killed_process_is_told_and_ends_the_others(artifact: Path, rank: int) -> None:
    model = parallel_model_load(artifact)
    numbers = pids(model)
    home = model._workers._home.name
    os.kill(numbers[rank], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(PeerLostError, match=f"rank {rank} was killed by SIGKILL[\\s\\S]*restart=True"):
            model(*batch(1, 8))
    assert gone(numbers)
    assert not Path(home).exists()
    model.close()
    with pytest.raises(RuntimeError, match="was closed: load it again"):
        model(*batch(1, 8))


def test_a_call_that_takes_too_long(artifact: Path) -> None:
    with parallel_model_load(artifact, timeout=1.0) as model:
        numbers = pids(model)
        os.kill(numbers[1], signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"rank 0, 1 did not answer within the timeout of 1 s"):
                model(*batch(1, 8))
        assert gone(numbers)


def test_a_call_that_is_interrupted(served: TensorParallelModel) -> None:
    """Ctrl-C ends the wait, not the processes; the answer that comes late is not taken for the next one's."""
    numbers = pids(served)
    os.kill(numbers[1], signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  it may come early
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        served(*batch(3, 8))
    os.kill(numbers[1], signal.SIGCONT)
    assert error_of(served, 2, 8) < EXACT
    assert pids(served) == numbers


@pytest.mark.slow
def test_interrupted_between_two_ranks(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was asked and the other was not, which it would wait for: both are ended, and that is said."""
    asked: list[Connection] = []
    send = Connection.send_bytes

    def once(connection: Connection, message: bytes) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(connection)
        send(connection, message)

    with parallel_model_load(artifact) as model:
        numbers = pids(model)
        monkeypatch.setattr(Connection, "send_bytes", once)
        with pytest.raises(KeyboardInterrupt):
            model(*batch(1, 8))
        assert gone(numbers)
        with pytest.raises(BackendError, match="interrupted while its ranks were being asked"):
            model(*batch(1, 8))
        monkeypatch.undo()
        model.restart = True
        assert error_of(model, 1, 8) < EXACT


SCRIPT = """
import json, os, signal, sys
sys.modules["models"] = None   # cannot be imported
import torch, tpcore
from tpcore.trace import parallel_model_load
model = parallel_model_load(sys.argv[1])
ids = torch.tensor(json.loads(sys.argv[2]))
out = model(ids, mask=torch.ones_like(ids))
print(json.dumps([float(out["logits"].sum()), [p.pid for p in model._workers._processes.all]]), flush=True)
if sys.argv[3] == "kill in a call":
    os.kill(model._workers._processes.all[1].pid, signal.SIGSTOP)
    model._workers._answers = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # when all ranks were asked
    model(ids, ids)
"""


@pytest.mark.parametrize("end", ["return", "kill in a call"])
def test_a_plain_program_that_has_not_the_models_code(artifact: Path, tmp_path: Path, end: str) -> None:
    """However it ends, its processes end too. It has neither a main guard nor the class of the model."""
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("tpcore", "runpy", "queue"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the directory at hand')")
    ids, _ = batch(1, 8)
    done = subprocess.run(
        [sys.executable, str(script), str(artifact), json.dumps(ids.tolist()), end],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=forked.PATIENCE,
        check=False,
    )
    assert done.returncode == (0 if end == "return" else -9), done.stderr
    assert done.stderr == ""
    total, numbers = json.loads(done.stdout)
    want = plain()(ids, torch.ones_like(ids))["logits"].sum()
    assert total == pytest.approx(float(want), abs=1e-9)
    if end == "kill in a call":  # the first waits for the second in a collective, for two minutes if left alone
        stopped = numbers.pop()
        assert gone(numbers)
        os.kill(stopped, signal.SIGKILL)
    assert gone(numbers)


FORKS = """
import os, sys, torch
from tpcore.trace import parallel_model_load
model = parallel_model_load(sys.argv[1])

def refused():
    ids = torch.ones(1, 8, dtype=torch.long)
    before = model(ids, ids)["logits"]
    for close in (False, True):
        if not (child := os.fork()):
            if close:
                model.close()
            try:
                model(ids, ids)
            except RuntimeError as e:
                print(e, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    print(torch.equal(model(ids, ids)["logits"], before), flush=True)

refused()
"""


@pytest.mark.slow
def test_forks(artifact: Path, tmp_path: Path) -> None:
    """One that calls the model is refused and changes nothing."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    run = [sys.executable, str(script), str(artifact)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=forked.PATIENCE, check=True)
    *told, equal = done.stdout.splitlines()
    assert len(told) == 2
    assert all("of which this one is a fork: load it here again" in line for line in told)
    assert equal == "True"


WEIGHTS, GRAPH = "tp_rank_1/model.safetensors", "programs/0/graph.json"
CONSTANTS, HUGE = "programs/0/constants.safetensors", 3 << 30


def spoil(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def say(folder: Path, files: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Change what the manifest says, also of files."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "files": {**data["files"], **(files or {})}, **changes}))


def grow(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"")
    os.truncate(folder / file, HUGE)
    say(folder, {file: {"bytes": HUGE, "checksum": ""}})


def many(folder: Path) -> None:
    record = json.loads((folder / "manifest.json").read_text())["files"]["tp_rank_0/model.safetensors"]
    say(folder, {f"tp_rank_{rank}/model.safetensors": record for rank in range(2, 100_000)}, tp=100_000)


def swap(folder: Path) -> None:
    first, second = (folder / f"tp_rank_{rank}/model.safetensors" for rank in (0, 1))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def of_another_save(path: Path) -> None:
    raw = path.read_bytes()
    (save_id,) = re.findall(rb'"save_id":"(\w+)"', raw)
    path.write_bytes(raw.replace(save_id, b"0" * len(save_id)))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "is not a traced model: it has no manifest.json"),
    "no rank": (lambda f: shutil.rmtree(f / "tp_rank_1"), f"{WEIGHTS} is missing, and tp=2 needs one per rank"),
    "short weights": (
        lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 8),
        rf"{WEIGHTS} is damaged: it has \d+ bytes and was written with",
    ),
    "other weights": (lambda f: spoil(f / WEIGHTS, -1), f"{WEIGHTS} is not the file that was written"),
    "other graph": (
        lambda f: spoil(f / GRAPH, (f / GRAPH).stat().st_size // 2),
        "graph.json is not the file that was written",
    ),
    "no graph": (lambda f: (f / GRAPH).unlink(), "graph.json is missing"),
    "version": (lambda f: say(f, version=99), "is of format version 99, this tpcore reads version 1"),
    "format": (lambda f: say(f, format="tpcore.checkpoint"), "is not of a traced model"),
    "not json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
    "way out": (lambda f: say(f, {"../x": {"bytes": 0, "checksum": ""}}), "names '../x', which is not a file in"),
    "too many": (many, "tp_rank_2/model.safetensors is missing"),
    "huge graph": (
        lambda f: grow(f, GRAPH),
        f"graph.json is damaged: it has {HUGE} bytes, more than the limit of 268435456",
    ),
    "huge constants": (lambda f: grow(f, CONSTANTS), "constants.safetensors is not a whole safetensors file"),
    "tp 1.5": (lambda f: say(f, tp=1.5), "manifest.json is damaged: TypeError: 1.5 where <class 'int'> belongs"),
    "tp true": (lambda f: say(f, tp=True), "manifest.json is damaged: TypeError: True where <class 'int'> belongs"),
    "tp -1": (lambda f: say(f, tp=-1), "manifest.json is damaged: ValueError: tp=-1, and a model has 1 rank or more"),
}
# the files have the size on record, and each tensor has the shape that it should have
MIXED_UP: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped": (swap, "tp_rank_0/model.safetensors is of 'tp_rank_1' in save"),
    "twice the same": (
        lambda f: shutil.copy(f / "tp_rank_0/model.safetensors", f / WEIGHTS),
        f"{WEIGHTS} is of 'tp_rank_0' in save",
    ),
    "another save": (lambda f: of_another_save(f / WEIGHTS), "here belongs 'tp_rank_1' of save"),
}


@pytest.mark.parametrize("what", [*DAMAGES, *MIXED_UP])
def test_damaged_directories(artifact: Path, tmp_path: Path, what: str) -> None:
    damage, message = (DAMAGES | MIXED_UP)[what]
    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        parallel_model_load(folder, verify=what in DAMAGES)


def test_saving_is_whole_or_not_at_all(
    served: TensorParallelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "saved"
    parallel_model_save(served, target)
    before = {p: p.stat().st_ino for p in target.rglob("*")}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        parallel_model_save(served, target)
    monkeypatch.undo()
    assert {p: p.stat().st_ino for p in target.rglob("*")} == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match=r"it holds 'notes.txt'"):
        parallel_model_save(served, tmp_path / "mine")


@pytest.mark.slow
def test_calls_inside_and_outside_of_inference_mode(artifact: Path, served: TensorParallelModel) -> None:
    """Whichever comes first. The second model's processes end when nobody holds it any more."""
    with torch.inference_mode(False):
        served(*batch(2, 8))
    model = parallel_model_load(artifact, timeout=60)
    numbers = pids(model)
    for first in (True, False):
        for inside in (first, not first, first):
            with torch.inference_mode(inside):
                assert error_of(model, 2, 8) < EXACT
        model = served
    gc.collect()
    assert gone(numbers)


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turn = Turn()
    order: list[int] = []

    def take(n: int) -> None:
        with turn:
            order.append(n)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(20)]
    with turn:
        for n, thread in enumerate(threads):
            thread.start()
            while len(turn._waiting) <= n + 1:  # until it is in the queue, behind this one
                pass
    for thread in threads:
        thread.join(60)
    assert order == list(range(20))
    with turn:
        pass


@pytest.mark.parametrize("given", [False, True])
def test_a_turn_that_is_interrupted_is_the_next_ones(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait, and in the moment in which the turn was given."""
    turn = Turn()

    def interrupted(predicate: object) -> None:
        if given:
            turn.__exit__()  # of the one whose turn it was
        raise KeyboardInterrupt

    turn.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(turn._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turn.__enter__()
    if not given:
        turn.__exit__()
    assert not turn._waiting
    with turn:
        pass
