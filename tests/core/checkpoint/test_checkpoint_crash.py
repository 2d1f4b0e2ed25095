"""A save that fails or dies at any of its steps leaves the previous checkpoint or the new one, whole.

Ranks are threads, of which each step is taken, or processes that are killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zlib
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.killed_saves import Counted, killed, state, version
from helpers.rank_pool import RankPool
from helpers.tiers import tiers

from tpcore.checkpoint import save
from tpcore.checkpoint.storage import files
from tpcore.checkpoint.storage import publish as staging
from tpcore.checkpoint.write import save as writing
from tpcore.errors import CheckpointError, PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_fsync")

MESH = Mesh({"tp": 2})


class Killed(BaseException):
    """Stands for the end of the process: nothing of tpcore may catch it and clean up."""


def write(ctx: ParallelContext, path: str | Path, number: int) -> None:
    save(state(ctx, number), path)


class Steps:
    """Counts the steps of a save on the file system, all ranks together, and stops it at one of them. One is in the
    middle of each write, as where a disk is full."""

    def __init__(self, patch: pytest.MonkeyPatch, stop: int, error: type[BaseException]) -> None:
        self.count, self.stop, self.error, self.dead = 0, stop, error, False
        wrapped = SimpleNamespace(**vars(os))
        for name in ("fsync", "link", "mkdir", "rename", "unlink"):
            setattr(wrapped, name, self.step(getattr(os, name)))
        for module in (files, staging, writing):
            patch.setattr(module, "os", wrapped)
        for module in (files, staging):
            patch.setattr(module, "open", self.opened, raising=False)
        patch.setattr(staging, "_exchange", self.step(staging._exchange))
        patch.setattr(staging, "shutil", SimpleNamespace(**{**vars(shutil), "rmtree": self.step(shutil.rmtree)}))

    def opened(self, path: Any, mode: str) -> Any:
        f = self.step(open)(path, mode)
        return Counted(f, self.step(lambda: None)) if "x" in mode else f

    def step(self, real: Any) -> Any:
        def stopping(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.dead or self.count == self.stop:
                self.dead = self.error is Killed  # the dead do nothing any more
                if self.error is Killed or not kwargs.get("ignore_errors"):
                    raise self.error(f"step {self.count}")
                return None
            return real(*args, **kwargs)

        return stopping


CASES = ["first", "exchange", "no exchange", "first beside logs", "beside logs"]
ONCE = zip(cycle([Killed, OSError]), CASES, strict=False)


@pytest.mark.parametrize(("error", "case"), tiers(ONCE, slow=product([OSError, Killed], CASES)))
def test_every_step(error: type[BaseException], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a first save, and of later ones where two names can be swapped in one step and where they cannot,
    and into a directory that holds other files, which stay."""
    previous = not case.startswith("first")
    logs = {"logs", "notes.txt"} if case.endswith("logs") else set()
    if case == "no exchange":
        monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    run_ranks(MESH, lambda ctx: write(ctx, tmp_path / "first", 1))
    seen: set[int] = set()
    stop = 0
    while True:
        stop += 1
        home = tmp_path / str(stop)
        path = home / "c"
        if previous:
            shutil.copytree(tmp_path / "first", path)
        if logs:
            (path / "logs").mkdir(parents=True)
            (path / "notes.txt").write_text("mine")
            inode = path.stat().st_ino
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch, stop, error)
            failed = _try(path)
        if logs:
            assert logs <= set(os.listdir(path))
            assert path.stat().st_ino == inode
        if steps.count < stop:
            break
        if failed and error is OSError:
            # an error is an error on every rank, and nothing is left of what was tried
            assert failed == {CheckpointError}
            assert sorted(os.listdir(home) if home.exists() else []) in ([], ["c"])
        if not failed:
            assert version(path) == 2
        elif previous or os.path.exists(Path(staging.resolve(str(path))) / files.MANIFEST):
            seen.add(version(path))
        run_ranks(MESH, lambda ctx: write(ctx, path, 3))  # noqa: B023
        assert version(path) == 3
        assert os.listdir(home) == ["c"]
        assert set(os.listdir(path)) == {"manifest.json", "tp_rank_0", "tp_rank_1", *logs}
    assert stop > 25
    if previous:
        assert seen <= {1, 2}
        assert 1 in seen


def _try(path: Path) -> set[type[BaseException]]:
    """Save version 2; what it ended in on the ranks that ended by themselves."""
    ends: set[type[BaseException]] = set()

    def one(ctx: ParallelContext) -> None:
        try:
            write(ctx, path, 2)
        except Exception as e:
            ends.add(type(e))
            raise

    try:
        run_ranks(MESH, one)
    except (CheckpointError, Killed) as e:
        ends.add(type(e))
    return ends


def test_the_instant_between_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has no manifest: the new checkpoint is found beside it, and put in place by the next save."""
    monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    path = tmp_path / "c"
    stop = 0
    run_ranks(MESH, lambda ctx: write(ctx, path, 1))
    while (path / "manifest.json").exists():
        stop += 1
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, stop, Killed)
            assert _try(path)
    before = sorted(os.listdir(tmp_path))
    assert version(path) == 2
    assert sorted(os.listdir(tmp_path)) == before  # loading changes nothing
    for stop in (10, 40):  # while the second is put in place, while the third is written
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, stop, OSError)
            assert _try(path) == {CheckpointError}
        assert version(path) == 2
    assert os.listdir(tmp_path) == ["c"]


def test_all_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut could take away: every file and directory is on the disk first, the name next."""
    done: list[str] = []

    def fsync(fd: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{fd}"))

    def named(real: Any) -> Any:
        return lambda a, b: (done.append("named") if ".saving-" in str(a) else None, real(a, b))[1]

    for first in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(os, "rename", named(os.rename))
            patch.setattr(staging, "_exchange", named(staging._exchange))
            done.clear()
            run_ranks(MESH, lambda ctx: write(ctx, tmp_path / "c", 1))
        assert done.count("named") == 1
        before, after = done[: done.index("named")], done[done.index("named") + 1 :]
        synced = {path.partition(".saving-")[2].partition("/")[2] for path in before if ".saving-" in path}
        there = {str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*")}
        assert synced == {"", *there}, first
        manifest = next(i for i, path in enumerate(before) if path.endswith("manifest.json"))
        assert all(".safetensors" not in path and "state.json" not in path for path in before[manifest:])
        assert after[-1] == str(tmp_path)


def test_two_jobs_save_at_once(tmp_path: Path) -> None:
    """The second one is told, and takes nothing of the first one's away."""
    path = tmp_path / "c"
    run_ranks(MESH, lambda ctx: write(ctx, path, 1))
    (tmp_path / ".c.saving-other").mkdir()
    with open(tmp_path / ".c.lock", "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another job is saving to"):
            run_ranks(MESH, lambda ctx: write(ctx, path, 2))
        assert (tmp_path / ".c.saving-other").exists()
    assert version(path) == 1
    run_ranks(MESH, lambda ctx: write(ctx, path, 2))
    assert version(path) == 2
    assert os.listdir(tmp_path) == ["c"]


def test_read_only_directory(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        home = Path("/proc")  # root may write anywhere but here
    else:
        home = tmp_path / "home"
        home.mkdir(mode=0o500)

    def one(ctx: ParallelContext) -> None:
        with pytest.raises(CheckpointError, match=str(home)):
            write(ctx, home / "c", 1)

    run_ranks(MESH, one)


@pytest.mark.parametrize("sizes", [(), (0,), (5, 0, 7), (10, 23, 1, 40)])
def test_write_parts(sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of all sizes, some of which have the disk begin early."""
    monkeypatch.setattr(files, "CHUNK", 7)
    monkeypatch.setattr(files, "_EARLY", 14)
    parts = [bytes(range(size)) for size in sizes]
    record, crcs = files.write_parts(str(tmp_path / "f"), ([part[:5], part[5:]] for part in parts))
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert record == (sum(sizes), f"{zlib.crc32(b''.join(parts)):08x}")
    assert crcs == [f"{zlib.crc32(part):08x}" for part in parts]


# -- killed by SIGKILL: ranks that are processes ------------------------------------------------------------
# The slow tests take the first step, the last and some between them, others for each of three ways, and rank 1 in one
# way only, for rank 0 puts a checkpoint in place. The drills take each.
WAYS = ["first", "exchange", "no exchange", "async"]
KILLED = [(victim, how) for victim in (0, 1) for how in WAYS]


def stops(steps: int, way: int, each: bool) -> list[int]:
    """At which steps to kill."""
    stride = 1 if each else max(2, steps // 2)
    return sorted({1, steps - 2, steps, *range(2 + way % stride, steps, stride)})


def prepared(home: Path, old: Path, how: str) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    if how != "first":
        shutil.copytree(old, home / "c")


@pytest.mark.parametrize(
    ("victim", "how", "each"),
    tiers(
        [],
        [(*point, False) for point in [(0, "first"), (0, "exchange"), (1, "async")]],
        [(*point, True) for point in KILLED],
    ),
)
def test_killed_at_a_step(how: str, victim: int, each: bool, pool: RankPool, tmp_path: Path) -> None:
    """After each the previous or the new checkpoint is there, whole, and the next save clears up."""
    run_ranks(MESH, lambda ctx: save(state(ctx, 1), tmp_path / "old"))
    home, seen = tmp_path / "home", set()
    prepared(home, tmp_path / "old", how)
    steps = pool.run(MESH, killed, str(home), how, victim, 0)[victim]
    assert version(home / "c") == 2
    assert os.listdir(home) == ["c"]
    assert steps > (25 if victim == 0 else 6)
    for stop in stops(steps, WAYS.index(how), each):
        prepared(home, tmp_path / "old", how)
        outcomes = pool.outcomes(MESH, killed, str(home), how, victim, stop)
        if outcomes[victim].error is None:
            assert stop > steps - 3  # the first save of a process takes some steps more
            continue
        assert isinstance(outcomes[victim].error, PeerLostError)  # and nobody waits for it
        try:
            seen.add(version(home / "c"))
        except CheckpointError:
            assert how == "first"  # where nothing was before there may be nothing, but not half of it
            assert not (home / "c").exists()
    pool.run(MESH, killed, str(home), how, victim, 0)
    assert version(home / "c") == 2
    assert os.listdir(home) == ["c"]
    if victim == 0:  # rank 0 puts it in place
        assert seen == ({2} if how == "first" else {1, 2})
    elif how == "async":  # rank 0 may put it in place while this rank, its part written, lets go of its locks
        assert seen <= {1, 2}
        assert 1 in seen
    else:
        assert seen <= {1}
