"""Ranks whose parts do not fit together: a save refuses them on all ranks, and keeps what is there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import files_in, refit, values
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint import load, save, wait
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_fsync")

State = Mapping[str, Any]
TP, BOTH = Mesh({"tp": 2}), Mesh({"dp": 2, "tp": 2})


def net(width: int = 8, dtype: torch.dtype = torch.float32, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        tpcore.ColumnParallelLinear(3, width, gather_output=False, blocks=stride),
        tpcore.RowParallelLinear(width, 3, input_is_parallel=True),
    ).to(dtype)


def more(at: int) -> Callable[[ParallelContext], State]:
    """A further parallel layer on tp rank ``at`` alone."""

    def state(ctx: ParallelContext) -> State:
        layers = [net()] + [tpcore.ColumnParallelLinear(3, 8)] * (tp_rank(ctx) == at)
        return nn.Sequential(*layers).state_dict()

    return state


def tied(ctx: ParallelContext) -> State:
    state: dict[str, Tensor] = tpcore.ColumnParallelLinear(3, 8).state_dict()
    other = state if tp_rank(ctx) == 0 else tpcore.ColumnParallelLinear(3, 8).state_dict()
    return state | {"again": other["weight"]}


def tp_rank(ctx: ParallelContext) -> int:
    return ctx.mesh.coords(ctx.rank).get("tp", 0)


def odd(**changes: Any) -> Callable[[ParallelContext], State]:
    """Another model on the last tp rank."""
    return lambda ctx: net(**(changes if tp_rank(ctx) == 1 else {})).state_dict()


SHAPE = "rank 0 has float32 of shape [4, 3], cut of [8, 3] along dim 0 over tp"
REFUSED: dict[str, tuple[Callable[[ParallelContext], State], str]] = {
    "width": (
        odd(width=16),
        f"'0.weight' of model.safetensors: {SHAPE}, "
        "rank 1 has float32 of shape [8, 3], cut of [16, 3] along dim 0 over tp",
    ),
    "dtype": (
        odd(dtype=torch.bfloat16),
        f"'0.weight' of model.safetensors: {SHAPE}, "
        "rank 1 has bfloat16 of shape [4, 3], cut of [8, 3] along dim 0 over tp",
    ),
    "blocks": (odd(stride=2), f"{SHAPE}, rank 1 has float32 of shape [4, 3], cut of [8, 3] along dim 0 over "),
    "a layer less": (more(0), f"'1.weight' of model.safetensors: {SHAPE}, rank 1 has none"),
    "a layer more": (more(1), "'1.weight' of model.safetensors: rank 0 has none, rank 1 has float32 of "),
    "ties": (tied, "'again' of model.safetensors: rank 0 has none, rank 1 has float32 of shape [4, 3]"),
}


@pytest.mark.parametrize(
    ("what", "mesh", "background"),
    [(what, TP, False) for what in REFUSED] + [("width", BOTH, True), ("ties", BOTH, False), ("dtype", TP, True)],
)
def test_they_replace_nothing(what: str, mesh: Mesh, background: bool, tmp_path: Path) -> None:
    state, message = REFUSED[what]
    run_ranks(TP, lambda ctx: save({"model": net().state_dict(), "epoch": 1}, tmp_path / "c"))
    before = files_in(tmp_path)

    def one(ctx: ParallelContext) -> str:
        with pytest.raises(CheckpointError) as caught:
            save({"model": state(ctx), "epoch": 2}, tmp_path / "c", background=background)
        wait()
        return str(caught.value)

    (told,) = set(run_ranks(mesh, one))
    assert f"cannot save {tmp_path / 'c'}: the ranks' parts do not fit together" in told
    assert message in told
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("all_dp", [False, True])
def test_copies_along_dp_differ(all_dp: bool, tmp_path: Path) -> None:
    """dp rank 0 writes alone, so only where each writes a share does it matter what the others have."""

    def one(ctx: ParallelContext) -> str:
        state = {"model": net(8 * (1 + ctx.rank)).state_dict(), "plain": {"x": torch.ones(2 + ctx.rank)}}
        try:
            save(state, tmp_path / "c", share_writes=all_dp)
        except CheckpointError as e:
            return str(e)
        assert load(tmp_path / "c", net())["plain"]["x"].shape == (2,)
        return ""

    (told,) = set(run_ranks(Mesh({"dp": 2, "tp": 1}), one))
    assert ("rank 1 has float32 of shape [16, 3]" in told) == all_dp
    assert os.listdir(tmp_path) == ([] if all_dp else ["c"])


@pytest.mark.parametrize("fits", [True, False])
def test_stages(fits: bool, tmp_path: Path) -> None:
    """Stages have names of their own, and share a table that is sharded over them too."""

    def one(ctx: ParallelContext) -> list[str]:
        stage, both = ctx.mesh.coords(ctx.rank)["pp"], ctx.comm("pp", "tp")
        rows = 16 if fits or stage == 0 else 32
        table = tpcore.ParallelEmbedding(rows, 3, group=both)
        layers = {f"layer{stage}": net(8 + 8 * stage), "table": table}
        try:
            save({"model": nn.ModuleDict(layers).state_dict()}, tmp_path / "c")
        except CheckpointError as e:
            return str(e).splitlines()[1:]
        load(tmp_path / "c", nn.ModuleDict(layers))
        return []

    told = run_ranks(Mesh({"pp": 2, "tp": 2}), one)
    theirs = "has float32 of shape [8, 3], cut of [32, 3] along dim 0 over pp and tp"
    mine = theirs.replace("[8, 3]", "[4, 3]").replace("[32, 3]", "[16, 3]")
    name = "'table.weight' of model.safetensors"
    wrong = [f"  {name}: rank 0 {mine}, rank {rank} {theirs}" for rank in (2, 3)]
    assert told == [[] if fits else wrong] * 4


@pytest.mark.parametrize("all_dp", [False, True])
def test_what_ranks_may_have_of_their_own(all_dp: bool, tmp_path: Path) -> None:
    """Plain layers, values and tensors, and an optimizer's state: they load as each rank had them."""

    def build(rank: int) -> nn.Sequential:
        return nn.Sequential(net(), nn.Linear(2, 2 + rank), *[nn.Linear(2, 2)] * rank).double()

    def one(ctx: ParallelContext) -> None:
        rank = tp_rank(ctx)
        torch.manual_seed(ctx.mesh.coords(ctx.rank)["tp"])
        model = build(rank)
        optimizer = torch.optim.Adam(model.named_parameters())
        for p in list(model.parameters())[rank:]:  # of what has no gradient yet Adam has no state
            p.grad = torch.ones_like(p)
        optimizer.step()
        own = {"epoch": rank, "x": torch.ones(2 + rank), **({"more": "y"} if rank else {})}
        state = {"model": model.state_dict(), "optimizer": optimizer, "own": own}
        save(state, tmp_path / "c", share_writes=all_dp)
        other = build(rank)
        into = torch.optim.Adam(other.named_parameters())
        found = load(tmp_path / "c", other, optimizer=into)
        assert found["own"].keys() == own.keys()
        assert found["own"]["x"].shape == (2 + rank,)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert into.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()

    run_ranks(BOTH, one)


@pytest.mark.parametrize("less", [0, 1])
def test_a_checkpoint_of_ranks_that_do_not_fit_is_refused(less: int, tmp_path: Path) -> None:
    """One of an older tpcore, which did not compare: rank ``less`` has a smaller layer than the other."""
    run_ranks(TP, lambda ctx: save({"model": net(8).state_dict()}, tmp_path / "small"))
    run_ranks(TP, lambda ctx: save({"model": net(16).state_dict()}, tmp_path / "c"))
    for name in ("state.json", "model.safetensors"):
        take(tmp_path / "small", tmp_path / "c", f"tp_rank_{less}/{name}")
    message = r"tp_rank_1/state\.json: .*0\.\w+ is .* different models"
    with pytest.raises(CheckpointError, match=message):
        run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "c", net(16 if less else 8)))
    with pytest.raises(CheckpointError, match=message):
        values(tmp_path / "c")


def take(source: Path, folder: Path, name: str) -> None:
    """Put a file of another save in place, with the save id and sums of this one."""
    mine, theirs = (json.loads((of / "manifest.json").read_text())["save_id"].encode() for of in (folder, source))
    (folder / name).write_bytes((source / name).read_bytes().replace(theirs, mine))
    refit(folder, name)


def test_a_tensor_of_one_rank_alone_is_named(tmp_path: Path) -> None:
    def one(ctx: ParallelContext) -> None:
        layers = [net()] + [nn.Linear(2, 2)] * (ctx.rank == 0)
        save({"model": nn.Sequential(*layers).state_dict()}, tmp_path / "c")

    run_ranks(TP, one)
    why = re.escape(f"{tmp_path}/c/tp_rank_1/state.json has no tensor '1.weight' of model.safetensors")
    with pytest.raises(CheckpointError, match=why):
        run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "c", nn.Sequential(net(), nn.Linear(2, 2))))
