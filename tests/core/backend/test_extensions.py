"""Each hook of an extension, used by a real distribution of somebody else's on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from helpers.distributions import installed
from typer.testing import CliRunner

import tpcore
from tpcore.backend import registry
from tpcore.comm.mappings import gather
from tpcore.runtime.guards import Guard, refusing, whole_tensors_only
from tpcore.runtime.guards import installed as guarded
from tpcore.testing import run_ranks
from tpcore.testing.threads import ThreadBackend, ThreadWorld

ALL = """
    import os

    import numpy as np
    import torch

    from tpcore.backend import hookimpl
    from tpcore.checkpoint.forms.rank_files import RankFiles, grid
    from tpcore.checkpoint.forms.source import Form
    from tpcore.comm.observer import Observed, Observer
    from tpcore.layout.shard import mark_of
    from tpcore.runtime.guards import Guard, refusing

    theirs = "their value"

    @hookimpl
    def tpcore_names():
        return {"theirs": __name__}

    class Npz(RankFiles):
        form = "npz shards"

        def read(self, file):
            with np.load(file) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}, {}

    def open_npz(path, how, stack):
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        files = {(0, i): os.path.join(path, name) for i, name in enumerate(names) if name.endswith(".npz")}
        return Npz(path, grid(path, files), how) if files else None

    @hookimpl
    def tpcore_checkpoint_forms():
        return [Form(sharded=True, open=open_npz)]

    def no_part(t, *args, **kwargs):
        if mark_of(t) is not None:
            raise ValueError("the rank of a part is not that of the whole")

    @hookimpl
    def tpcore_guards():
        return [Guard(torch.linalg, "matrix_rank", refusing(no_part), "the rank of the whole")]

    class Seen(Observer):
        def __init__(self, ctx, certain):
            self.mesh, self.certain, self.log = ctx.mesh, certain, []

        def same(self, name, t):
            self.log.append(("same", name))

        def part(self, y, comm, dim, kind):
            self.log.append((kind, dim, tuple(y.shape)))
            return y.as_subclass(Observed)

        def compare(self, comm):
            self.log.append(("compare", comm.size))

    @hookimpl
    def tpcore_observer(ctx, certain):
        return Seen(ctx, certain)

    @hookimpl
    def tpcore_commands(app):
        @app.command()
        def greet():
            print("a command of theirs")

        @app.command()
        def other():
            pass
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def forget() -> None:
        registry.manager.cache_clear()
        registry.names.cache_clear()

    def put(name: str, code: str) -> None:
        place = tmp_path / name
        modules.append(installed(place, name, code, version="1.2", group="tpcore.extensions"))
        monkeypatch.syspath_prepend(place)
        forget()

    modules: list[str] = []
    yield put
    for module in modules:
        sys.modules.pop(module, None)
    forget()


def test_a_name(install: Install) -> None:
    install("mine", ALL)
    assert tpcore.theirs == "their value"
    vars(tpcore).pop("theirs", None)


def test_a_name_of_two_extensions_is_told(install: Install) -> None:
    for name in ("mine", "other"):
        install(name, "from tpcore.backend import hookimpl\n@hookimpl\ndef tpcore_names(): return {'theirs': __name__}")
    with pytest.raises(ValueError, match=r"tpcore\.theirs is added by tpcore_\w+ and by tpcore_\w+: uninstall one"):
        _ = tpcore.theirs


def test_a_checkpoint_form(install: Install, tmp_path: Path) -> None:
    install("mine", ALL)
    full, folder = torch.randn(8, 4), tmp_path / "saved"
    folder.mkdir()
    for rank, shard in enumerate(full.chunk(2)):
        np.savez(folder / f"{rank}.npz", weight=shard.numpy())

    def load(ctx: tpcore.ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8, bias=False)
        tpcore.checkpoint.load(folder, layer)
        assert torch.equal(layer.weight, full.chunk(4)[ctx.rank])

    run_ranks(tpcore.Mesh({"tp": 4}), load)


def test_a_guard_stands_while_a_job_runs(install: Install) -> None:
    install("mine", ALL)
    function = torch.linalg.matrix_rank

    def check(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match="the rank of a part is not"):
            torch.linalg.matrix_rank(tpcore.ColumnParallelLinear(4, 4).weight)
        assert torch.linalg.matrix_rank(torch.eye(3)) == 3

    run_ranks(tpcore.Mesh({"tp": 2}), check)
    assert torch.linalg.matrix_rank is function
    tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    assert torch.linalg.matrix_rank is not function
    tpcore.shutdown()
    assert torch.linalg.matrix_rank is function


class Owner:
    """Functions of each kind that a class has."""

    def bound(self, x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> int:
        return x

    @staticmethod
    def of_none(x: int) -> int:
        return x


@pytest.mark.parametrize("name", ["bound", "of_class", "of_none"])
def test_guards_nest_on_each_kind_of_function(name: str) -> None:
    seen: list[str] = []
    there = vars(Owner)[name]
    rows = [Guard(Owner, name, refusing(lambda *args, who=who: seen.append(who)), "") for who in ("first", "second")]
    with guarded(rows):
        assert getattr(Owner(), name)(3) == 3
        assert getattr(Owner, name).__name__ == name
    assert (seen, vars(Owner)[name]) == (["second", "first"], there)


def test_a_guard_of_what_a_library_no_longer_has_is_told_and_none_is_left() -> None:
    function = torch.linalg.matrix_rank
    rows = [Guard(torch.linalg, name, refusing(print), "their law") for name in ("matrix_rank", "gone")]
    with pytest.raises(ValueError, match=r"torch\.linalg.* has no gone, which tpcore guards, for their law"):
        guarded(rows).__enter__()
    assert torch.linalg.matrix_rank is function


def test_an_observer_is_told_what_layers_do(install: Install) -> None:
    install("mine", ALL)

    def check(ctx: tpcore.ParallelContext) -> None:
        own = importlib.import_module("tpcore_mine")
        seen = own.Seen(ctx, False)
        with tpcore.use(replace(ctx, observer=seen)):
            up = tpcore.ColumnParallelLinear(4, 8, gather_output=False)
            down = tpcore.RowParallelLinear(8, 4, input_is_parallel=True)
            hidden = up(torch.ones(2, 4))
            assert isinstance(hidden, own.Observed)
            assert type(down(hidden)) is torch.Tensor, "layers compute with the tensor alone"
            assert type(gather(hidden, ctx.comm("tp"))) is torch.Tensor
            tpcore.optimizer_step(torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.1))
        kinds = [entry for entry in seen.log if "initial" not in str(entry[1])]
        assert kinds == [("same", "the input of ColumnParallelLinear"), ("features", -1, (2, 4)), ("compare", 2)]

    run_ranks(tpcore.Mesh({"tp": 2}), check)


def test_a_checked_run_has_the_observers_of_all_extensions(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", "always")
    install("mine", ALL)
    install("other", ALL)
    told = []
    for module in ("tpcore_mine", "tpcore_other"):
        monkeypatch.setattr(importlib.import_module(module).Seen, "compare", lambda self, comm: told.append(self))
    ctx = tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    try:
        assert ctx.observer is not None
        ctx.observer.compare(ctx.comm("tp"))
        assert {type(seen).__module__ for seen in told} == {"tpcore_mine", "tpcore_other"}
        assert all((seen.mesh, seen.certain) == (ctx.mesh, False) for seen in told)
    finally:
        tpcore.shutdown()
    monkeypatch.setenv("TPCORE_CHECK", "warmup")
    assert tpcore.init(ThreadBackend(0, ThreadWorld(1))).observer is None
    tpcore.shutdown()


def test_a_checked_run_without_an_observer_says_so(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", "always")
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    registry.manager.cache_clear()
    with pytest.raises(tpcore.BackendError, match="TPCORE_CHECK=always asks for a checked run, and no installed ext"):
        tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    assert not tpcore.is_initialized()


def test_a_command(install: Install) -> None:
    install("mine", ALL)
    app = typer.Typer()
    registry.manager().hook.tpcore_commands(app=app)
    assert CliRunner().invoke(app, ["greet"]).output == "a command of theirs\n"


BROKEN = {
    "import fails": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "misspelt hook": ("from tpcore.backend import hookimpl\n@hookimpl\ndef tpcore_gards(): return []", "tpcore_gards"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_extension_is_left_out_and_named(how: str, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    code, said = BROKEN[how]
    install("broken", code)
    install("mine", ALL)
    with whole_tensors_only():
        assert tpcore.theirs == "their value"
    vars(tpcore).pop("theirs", None)
    (message,) = [text for text in caplog.messages if "'broken'" in text or "'mine'" in text]
    assert message.startswith("the extension 'broken' of tpcore-broken 1.2 is left out: ")
    assert said in message
