"""What Zero1 saves is the plain optimizer's state: any mesh, cut over dp or not, goes on with it."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nets import cut_net, plain_net
from helpers.worlds import each_rank
from test_optimizer_state import Staged, by_place, filled
from test_zero import assert_equals, cut, groups_of, mine, plainly, train
from torch import Tensor, nn

import tpcore
from tpcore import CheckpointError, Mesh, ParallelContext, Zero1
from tpcore.checkpoint import load, save, wait
from tpcore.checkpoint.storage.tensorfile import FileTensor
from tpcore.checkpoint.write.save import Options, Save
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks
from tpcore.train.zero.chunk import ParameterChunk

AdamW = torch.optim.AdamW
FULL = plain_net().state_dict()


def optimizer_of(net: nn.Module, zero: bool, **options: Any) -> torch.optim.Optimizer:
    groups = groups_of(net)
    return Zero1(AdamW, groups, lr=1e-2, **options) if zero else AdamW(groups, lr=1e-2)


@pytest.mark.parametrize(
    ("here", "there", "zero", "way"),
    [
        ((2, 2), (4, 1), (True, True), "optimizer"),
        ((3, 1), (1, 4), (True, True), "state_dict"),
        ((2, 2), (3, 2), (True, False), "optimizer"),
        ((1, 2), (2, 1), (False, True), "state_dict"),
    ],
)
def test_a_run_goes_on_at_another_mesh(
    tmp_path: Path, here: tuple[int, int], there: tuple[int, int], zero: tuple[bool, bool], way: str
) -> None:
    plain = plain_net()
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    reference = optimizer_of(plain, False)
    train(plain, reference, lambda ids: ids, range(3), plainly)
    three = copy.deepcopy(plain)
    train(plain, reference, lambda ids: ids, range(3, 6), plainly)  # its schedule begins anew, as that of the other

    def first(ctx: ParallelContext) -> None:
        net = cut_net(full)
        optimizer = optimizer_of(net, zero[0], bucket_mb=1e-3) if zero[0] else optimizer_of(net, False)
        train(net, optimizer, mine(ctx), range(3), cut)
        state: Any = optimizer if way == "optimizer" else optimizer.state_dict()
        save({"model": net.state_dict(), "optimizer": state}, tmp_path / "c")

    def second(ctx: ParallelContext) -> None:
        net = cut_net(full)
        optimizer = optimizer_of(net, zero[1])
        optimizer.load_state_dict(load(tmp_path / "c", net)["optimizer"])
        assert_equals(net, three, ctx, 1e-12)
        assert {values["step"].item() for values in optimizer.state_dict()["state"].values()} == {3}
        net = cut_net(three.state_dict())
        alone = optimizer_of(net, zero[1])
        load(tmp_path / "c", alone, model_key="optimizer")
        train(net, alone, mine(ctx), range(3, 6), cut)
        assert_equals(net, plain, ctx, 1e-12)

    run_ranks(Mesh({"dp": here[0], "tp": here[1]}), first)
    run_ranks(Mesh({"dp": there[0], "tp": there[1]}), second)


def staged(ctx: ParallelContext, zero: bool, *, named: bool = True) -> tuple[Staged, torch.optim.Optimizer]:
    """A model of stages after two steps, by gradients that are functions of name and place."""
    model = filled(ctx)
    params = model.named_parameters() if named else model.parameters()
    optimizer = Zero1(AdamW, params) if zero else AdamW(params)
    for step in (1, 2):
        for p, part in by_place(model, ctx, lambda place, step=step: place.sin() * step):
            p.grad = part
        tpcore.optimizer_step(optimizer)
    return model, optimizer


@pytest.mark.parametrize(("here", "zero"), [((1, 2), False), ((2, 2), True), ((4, 1), False)])
def test_the_state_of_stages_opens_at_any_number_of_them(tmp_path: Path, here: tuple[int, int], zero: bool) -> None:
    def write(ctx: ParallelContext) -> None:
        model, optimizer = staged(ctx, zero)
        save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "c")

    run_ranks(Mesh({"pp": here[0], "dp": 2, "tp": here[1]}), write)

    def read(ctx: ParallelContext) -> None:
        want_model, plain = staged(ctx, False)
        names, want = [name for name, _ in want_model.named_parameters()], plain.state_dict()["state"]
        model = Staged(ctx)
        fresh = AdamW(model.named_parameters())
        rest = load(tmp_path / "c", model)
        for name, value in want_model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        elsewhere = 1 < here[0] != ctx.mesh.axes["pp"] and ctx.rank == 0
        with pytest.warns(UserWarning, match=r"left out: model\.") if elsewhere else nullcontext():
            load(tmp_path / "c", fresh, model_key="optimizer")
        for got in (rest["optimizer"], fresh.state_dict()):
            assert got["param_groups"][0]["param_names"] == names
            assert got["state"].keys() == want.keys()
            for number, values in want.items():
                for key, value in values.items():
                    assert torch.equal(got["state"][number][key], value), (names[number], key)

    for pp, tp in ((1, 1), (1, 4), (2, 2), (4, 1)):
        run_ranks(Mesh({"pp": pp, "dp": 1, "tp": tp}), read)


def test_names_come_from_the_model_that_is_saved_too(tmp_path: Path) -> None:
    def rank(ctx: ParallelContext) -> None:
        model, optimizer = staged(ctx, False, named=False)
        with pytest.raises(ValueError, match=r"'optimizer': the parameters .* no names.*named_parameters"):
            save({"optimizer": optimizer}, tmp_path / "c")
        save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "c")

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)

    def read(ctx: ParallelContext) -> None:
        model = Staged(ctx)
        groups = load(tmp_path / "c", model)["optimizer"]["param_groups"]
        assert groups[0]["param_names"] == [name for name, _ in model.named_parameters()]

    run_ranks(Mesh({"pp": 1, "dp": 1, "tp": 2}), read)


@pytest.mark.parametrize("zero", [False, True])
def test_an_optimizer_that_no_stages_could_open_warns_where_it_is_saved(tmp_path: Path, zero: bool) -> None:
    def write(ctx: ParallelContext, *, with_model: bool) -> None:
        model, optimizer = staged(ctx, zero, named=False)
        state: dict[str, Any] = {"model": model.state_dict()} if with_model else {}
        save(state | {"optimizer": optimizer}, tmp_path / "c")

    one = Mesh({"pp": 1, "dp": 2, "tp": 1})
    with pytest.warns(UserWarning, match="at another number of pipeline stages. Save the optimizer itself"):
        run_ranks(one, lambda ctx: write(ctx, with_model=False))
    run_ranks(one, lambda ctx: write(ctx, with_model=True))  # the model names them


class Wide(nn.Module):
    """Weights of one size, so that shares can be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(tpcore.ColumnParallelLinear(16, 64, bias=False) for _ in range(6))


def stepped(dtype: torch.dtype, steps: int, made: tuple[Wide, Zero1] | None = None) -> tuple[Wide, Zero1]:
    """After steps by gradients that are functions of the place in the full tensor."""
    if made is None:
        model = Wide().to(dtype)
        made = model, Zero1(AdamW, model.named_parameters(), master_dtype=torch.float32)
    model, optimizer = made
    for _ in range(steps):
        for i, p in enumerate(model.parameters()):
            mark = sharding(p)
            assert mark is not None
            full = torch.linspace(-1, 1 + i, 64 * 16).view(64, 16)
            p.grad = mark.layout.shard(full, mark.ctx.rank, mark.ctx.mesh).to(dtype)
        tpcore.optimizer_step(optimizer)
    return model, optimizer


def write_wide(path: Path, mesh: Mesh, dtype: torch.dtype, steps: int, **options: Any) -> None:
    def rank(ctx: ParallelContext) -> None:
        model, optimizer = stepped(dtype, steps)
        save({"model": model.state_dict(), "optimizer": optimizer, "epoch": 5}, path, **options)
        wait()

    run_ranks(mesh, rank)


def tensors_alive(shape: tuple[int, ...]) -> int:
    """How many memories of CPU tensors of a shape there are in the process, beside those that were frozen."""
    found = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == shape and t.device.type == "cpu"]
    return len({t.untyped_storage().data_ptr() for t in found})


@pytest.mark.parametrize("background", [False, True])
def test_each_dp_rank_writes_its_share_and_gathers_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    whole, alive = ParameterChunk.whole, []

    def counted(self: ParameterChunk, part: Tensor) -> Tensor:
        out = whole(self, part)
        alive.append(tensors_alive((32, 16)))
        return out

    monkeypatch.setattr(ParameterChunk, "whole", counted)
    gc.collect()
    gc.freeze()  # millions of objects of other tests, which would be looked through each time

    write_wide(tmp_path / "c", Mesh({"dp": 2, "tp": 2}), torch.float32, 1, background=background)
    # in all: two tp ranks' 12 moments once, and one or two under way on each of four ranks; not 12 on each.
    # A save in the background copies the 6 weights of two ranks too
    assert max(alive) - min(alive) <= 2 * 12 + 2 * 4 + (12 if background else 0)
    one = 32 * 16 * 4
    for folder in (tmp_path / "c").glob("tp_rank_*"):
        # 6 weights and 12 moments: the first rank writes the weights, and so fewer moments
        written = {path.name: os.path.getsize(path) // one for path in folder.glob("*.safetensors")}
        assert written.pop("optimizer.safetensors") == 0  # the counts of steps
        assert written == {"model.safetensors": 6, "optimizer.dp0.safetensors": 3, "optimizer.dp1.safetensors": 9}


@pytest.mark.parametrize("meshes", [((4, 1), (2, 2)), ((2, 2), (1, 1))])
def test_masters_are_saved_and_a_resume_does_not_round(tmp_path: Path, meshes: Any) -> None:
    def before(ctx: ParallelContext) -> None:
        made = stepped(torch.bfloat16, 3)
        save({"model": made[0].state_dict(), "optimizer": made[1]}, tmp_path / "c")
        model, optimizer = stepped(torch.bfloat16, 3, made)
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all")

    def after(ctx: ParallelContext) -> None:
        model = Wide().bfloat16()
        optimizer = Zero1(AdamW, model.named_parameters(), master_dtype=torch.float32)
        optimizer.load_state_dict(load(tmp_path / "c", model)["optimizer"])
        stepped(torch.bfloat16, 3, (model, optimizer))
        want = Wide().bfloat16()
        rest = load(tmp_path / "all", want)
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(p, q)
        got = optimizer.state_dict()["state"]
        for number, values in rest["optimizer"]["state"].items():
            assert values.keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
            for key, value in values.items():
                assert value.dtype == torch.float32
                assert torch.equal(got[number][key], value)

    here, there = (Mesh({"dp": dp, "tp": tp}) for dp, tp in meshes)
    run_ranks(here, before)
    run_ranks(there, after)


# -- a load reads its own entries, and no more ------------------------------------------------------------
@pytest.mark.parametrize(("there", "alone"), [((2, 2), False), ((4, 1), True), ((3, 2), False), ((1, 1), True)])
def test_a_load_reads_this_ranks_entries_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[int, int], alone: bool
) -> None:
    """Of each moment and master 1/dp of the shard, and no tensor of a shard's shape is ever made."""
    write_wide(tmp_path / "c", Mesh({"dp": 2, "tp": 2}), torch.bfloat16, 2)
    read, amounts = FileTensor.read, list[tuple[str, int]]()

    def counted(self: FileTensor, starts: Any, out: Tensor, check: bool) -> None:
        amounts.append((self.file.path, out.numel()))
        read(self, starts, out, check)

    monkeypatch.setattr(FileTensor, "read", counted)

    def fresh(ctx: ParallelContext) -> Zero1:
        model = Wide().bfloat16()
        made = Zero1(AdamW, model.named_parameters(), master_dtype=torch.float32)
        if alone:
            rest = load(tmp_path / "c", made, model_key="optimizer")
            assert rest.keys() == {"model", "epoch"}
        else:
            assert load(tmp_path / "c", model, optimizer=made) == {"epoch": 5}
        return made

    dp, tp = there
    mesh = Mesh({"dp": dp, "tp": tp})
    states = run_ranks(mesh, lambda ctx: fresh(ctx).state_dict()["state"])
    entries = 64 * 16 // tp
    moments = [n for path, n in amounts if "optimizer.dp" in path]
    assert sum(moments) == dp * tp * 6 * 3 * entries // dp  # none is read twice
    assert max(moments) <= -(-entries // dp)

    def check(ctx: ParallelContext) -> None:
        want = load(tmp_path / "c", Wide().bfloat16())["optimizer"]["state"]
        for number, values in states[ctx.rank].items():
            assert values.keys() == want[number].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
            for key, value in values.items():
                assert torch.equal(value, want[number][key])

    run_ranks(mesh, check)


def test_a_moment_that_is_damaged_is_found_by_the_rank_that_compares_it(tmp_path: Path) -> None:
    write_wide(tmp_path / "c", Mesh({"dp": 2, "tp": 1}), torch.float32, 1)
    (file,) = (tmp_path / "c").glob("tp_rank_*/optimizer.dp1.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)

    def read(ctx: ParallelContext) -> None:
        model = Wide()
        for p in model.parameters():
            nn.init.zeros_(p)
        optimizer = Zero1(AdamW, model.named_parameters())
        with pytest.raises(CheckpointError, match="is damaged: its crc32"):
            load(tmp_path / "c", model, optimizer=optimizer)
        assert not any(p.any() for p in model.parameters())
        assert not optimizer.state

    run_ranks(Mesh({"dp": 2, "tp": 1}), read)


@each_rank(dp=1, tp=1)
def test_an_optimizer_goes_with_a_model(ctx: ParallelContext, tmp_path: Path) -> None:
    model, optimizer = stepped(torch.float32, 1)
    save({"model": model.state_dict()}, tmp_path / "c")
    with pytest.raises(ValueError, match="goes with a model"):
        load(tmp_path / "c", optimizer=optimizer)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    stepped(torch.float32, 1, (model, optimizer))
    changed = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="has no entry 'optimizer'; it has "):
        load(tmp_path / "c", model, optimizer=optimizer)
    for name, value in model.state_dict().items():  # left as it was
        assert torch.equal(value, changed[name])
        assert not torch.equal(value, before[name])


# -- a save between two steps, and in the middle of one ---------------------------------------------------
@pytest.mark.parametrize("grad_dtype", [None, torch.float64])
@pytest.mark.parametrize("how", ["save", "state_dict"])
@each_rank(dp=2, tp=1)
def test_no_state_is_saved_in_the_middle_of_a_step(
    ctx: ParallelContext, tmp_path: Path, how: str, grad_dtype: torch.dtype | None
) -> None:
    """One dp rank alone has a gradient, and all get the error."""
    used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    optimizer = Zero1(AdamW, [("used", used), ("unused", unused)], lr=1.0, grad_dtype=grad_dtype)
    called: dict[str, Callable[[], Any]] = {
        "save": lambda: save({"optimizer": optimizer}, tmp_path / "c"),
        "state_dict": optimizer.state_dict,
    }
    if ctx.coord("dp") == 1:
        (used * 4).sum().backward()
    with pytest.raises(ValueError, match=r"no step has used them: save after optimizer\.step\(\)"):
        called[how]()
    assert not (tmp_path / "c").exists()
    optimizer.reduce_gradients()  # between the mean and the step there is no state either
    with pytest.raises(ValueError, match="no step has used them"):
        called[how]()
    optimizer.step()
    called[how]()
    if ctx.coord("dp") == 1:
        (used * 4).sum().backward()
    optimizer.zero_grad()
    called[how]()


@each_rank(dp=1, tp=1)
def test_a_save_in_the_background_holds_the_values_of_its_call(ctx: ParallelContext, tmp_path: Path) -> None:
    """At dp=1 the gathered values are the optimizer's own memory, which the next step changes."""
    model, optimizer = stepped(torch.float32, 1)
    want = [t.clone() for t in tensors_of(optimizer)]
    started = Save({"optimizer": optimizer}, tmp_path / "c", Options(background=True))
    stepped(torch.float32, 1, (model, optimizer))
    started.put_together([started.write()])
    started.close()
    found = tensors_of(load(tmp_path / "c")["optimizer"])
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def tensors_of(state: Any) -> list[Tensor]:
    saved = state.state_dict() if isinstance(state, Zero1) else state
    return [t for values in saved["state"].values() for t in values.values()]
