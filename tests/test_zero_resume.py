"""A save between the backwards of one step keeps what they have summed, and the step goes on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net, cut_net, ids_of, loss_of, plain_net
from test_zero import assert_equals, mine
from torch import Tensor, nn

import tpcore
from tpcore import CheckpointError, Mesh, ParallelContext, Zero1
from tpcore.checkpoint import load, save
from tpcore.checkpoint.write.save import Options, Save
from tpcore.testing import run_ranks

AdamW = torch.optim.AdamW
BATCHES, BATCH = 4, 12  # backwards of one step, and the examples of each over all dp ranks


def backwards(net: nn.Module, step: int, some: range, ctx: ParallelContext | None = None) -> None:
    """Some of the backwards of a step, on this rank's share of each batch."""
    for i in some:
        ids = ids_of(BATCHES * step + i, BATCH)
        (loss_of(net, ids if ctx is None else mine(ctx)(ids)) / BATCHES).backward()


def whole(steps: int) -> nn.Module:
    """The plain model after steps that nothing interrupts."""
    net = plain_net()
    optimizer = AdamW(net.named_parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        backwards(net, step, range(BATCHES))
        optimizer.step()
    return net


FULL = {name: t.clone() for name, t in plain_net().state_dict().items()}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("here", "there"), [((2, 1), (2, 1)), ((2, 2), (3, 1)), ((1, 2), (2, 2)), ((4, 1), (1, 2))]
)
def test_a_step_goes_on_at_another_mesh(
    tmp_path: Path, here: tuple[int, int], there: tuple[int, int], before: int, wide: bool
) -> None:
    """Before the first step and after one; with sums of their own, and in ``.grad``."""
    want, half = whole(before + 2), whole(before + 1)
    options: dict[str, Any] = {"grad_dtype": torch.float64} if wide else {}

    def made(net: Net) -> Zero1:
        return Zero1(AdamW, net.named_parameters(), lr=1e-2, **options)

    def first(ctx: ParallelContext) -> None:
        net = cut_net(FULL, ctx)
        optimizer = made(net)
        for step in range(before):
            backwards(net, step, range(BATCHES), ctx)
            tpcore.optimizer_step(optimizer)
        backwards(net, before, range(2), ctx)
        save({"model": net.state_dict(), "optimizer": optimizer, "batch": 2}, tmp_path / "c")
        backwards(net, before, range(2, BATCHES), ctx)  # the save has left them as they were
        tpcore.optimizer_step(optimizer)
        assert_equals(net, half, ctx, 1e-12)

    def second(ctx: ParallelContext) -> None:
        net = Net().double()
        optimizer = made(net)
        assert load(tmp_path / "c", net, optimizer=optimizer) == {"batch": 2}
        backwards(net, before, range(2, BATCHES), ctx)
        tpcore.optimizer_step(optimizer)
        backwards(net, before + 1, range(BATCHES), ctx)
        tpcore.optimizer_step(optimizer)
        assert_equals(net, want, ctx, 1e-12)

    (dp, tp), (dp2, tp2) = here, there
    run_ranks(Mesh({"dp": dp, "tp": tp}), first)
    run_ranks(Mesh({"dp": dp2, "tp": tp2}), second)


def test_sums_of_bfloat16_gradients_are_not_rounded(tmp_path: Path) -> None:
    """256 + 1 is 256 in bfloat16: what the first part had summed is saved in float32. Bit for bit."""

    def made(grad_dtype: torch.dtype | None = torch.float32) -> tuple[nn.Parameter, Zero1]:
        weight = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        wide = {"master_dtype": torch.float32, "grad_dtype": grad_dtype}
        return weight, Zero1(torch.optim.SGD, [("w", weight)], lr=1.0, **wide)

    def part(weight: Tensor, ctx: ParallelContext, *amounts: float) -> None:
        for amount in amounts:
            (weight * (amount + 2 * ctx.coord("dp"))).sum().backward()

    def rank(ctx: ParallelContext) -> None:
        weight, optimizer = made()
        part(weight, ctx, 256.0, 1.0)
        save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "c")
        state = optimizer.state_dict()["state"][0]
        assert state.keys() == {"gradient"}
        assert torch.equal(state["gradient"], torch.full((6,), 257.0 + 2))
        part(weight, ctx, 1.0, 1.0)
        tpcore.optimizer_step(optimizer)
        want = optimizer.state_dict()["state"][0]["master"]
        assert (want == 1 - (259.0 + 4)).all()

        again, resumed = made()
        resumed.load_state_dict(load(tmp_path / "c")["optimizer"])
        part(again, ctx, 1.0, 1.0)
        tpcore.optimizer_step(resumed)
        assert torch.equal(resumed.state_dict()["state"][0]["master"], want)
        assert torch.equal(again, weight)

        narrow = made(None)[1]
        with pytest.raises(ValueError, match=r"gradients in torch\.float32.* grad_dtype=torch\.float32"):
            load(tmp_path / "c", model_or_optimizer=narrow, model_key="optimizer")
        plain = torch.optim.SGD([("w", nn.Parameter(torch.ones(6, dtype=torch.bfloat16)))], lr=1.0)
        with pytest.raises(CheckpointError, match=r"between the backwards of one step.*grad_dtype="):
            load(tmp_path / "c", model_or_optimizer=plain, model_key="optimizer")

    run_ranks(Mesh({"dp": 2, "tp": 1}), rank)


def test_a_plain_optimizer_goes_on_with_the_step(tmp_path: Path) -> None:
    def write(ctx: ParallelContext) -> None:
        net = cut_net(FULL, ctx)
        optimizer = Zero1(AdamW, net.named_parameters(), lr=1e-2, grad_dtype=torch.float64)
        backwards(net, 0, range(2), ctx)
        save({"model": net.state_dict(), "optimizer": optimizer}, tmp_path / "c")

    want = whole(1)

    def read(ctx: ParallelContext) -> None:
        net = Net().double()
        optimizer = AdamW(net.named_parameters(), lr=1e-2)
        load(tmp_path / "c", net, optimizer=optimizer)
        assert net.unused.weight.grad is None
        backwards(net, 0, range(2, BATCHES), ctx)
        tpcore.optimizer_step(optimizer)
        assert_equals(net, want, ctx, 1e-12)

    run_ranks(Mesh({"dp": 2, "tp": 2}), write)
    run_ranks(Mesh({"dp": 2, "tp": 1}), read)


def test_sums_that_torch_would_lose_are_refused() -> None:
    """``load_state_dict`` of a plain optimizer takes any key, and uses those that it knows."""

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(FULL, ctx)
        optimizer = Zero1(AdamW, net.named_parameters(), lr=1e-2)
        backwards(net, 0, range(BATCHES), ctx)
        tpcore.optimizer_step(optimizer)
        stepped = optimizer.state_dict()
        backwards(net, 1, range(1), ctx)
        middle = optimizer.state_dict()

        plain = AdamW(net.named_parameters(), lr=1e-2)
        plain.load_state_dict(middle)
        backwards(net, 1, range(1, BATCHES), ctx)
        with pytest.raises(ValueError, match=r"this AdamW is that of a Zero1 .* gradients of \d+ parameters"):
            tpcore.optimizer_step(plain)
        plain.load_state_dict(stepped)  # between two steps it is a plain state
        tpcore.optimizer_step(plain)

    run_ranks(Mesh({"dp": 2, "tp": 2}), rank)


def test_a_gradient_on_one_dp_rank_only_and_a_load_in_the_middle(tmp_path: Path) -> None:
    def rank(ctx: ParallelContext) -> None:
        used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
        optimizer = Zero1(torch.optim.SGD, [("used", used), ("unused", unused)], lr=1.0)
        before = optimizer.state_dict()
        assert before["state"] == {}
        if ctx.coord("dp") == 1:
            used.grad = torch.full((3,), 4.0)
        saved = optimizer.state_dict()
        assert {number: [*values] for number, values in saved["state"].items()} == {0: ["gradient"]}
        assert torch.equal(saved["state"][0]["gradient"], torch.full((3,), 2.0))
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
        tpcore.optimizer_step(optimizer)
        assert torch.equal(used, torch.full((3,), -2.0))
        assert torch.equal(saved["state"][0]["gradient"], torch.full((3,), 2.0))
        assert not unused.any()

        sums = Zero1(torch.optim.SGD, [("used", used)], lr=1.0, grad_dtype=torch.float64)
        (used * 3).sum().backward()
        sums.load_state_dict({**before, "param_groups": sums.state_dict()["param_groups"]})
        tpcore.optimizer_step(sums)  # the sum went with the state that was replaced
        assert torch.equal(used, torch.full((3,), -2.0))

    run_ranks(Mesh({"dp": 2, "tp": 1}), rank)


def test_between_the_mean_and_the_step_there_is_no_state() -> None:
    def rank(ctx: ParallelContext) -> None:
        net = cut_net(FULL, ctx)
        optimizer = Zero1(AdamW, net.named_parameters(), lr=1e-2)
        backwards(net, 0, range(1), ctx)
        optimizer.reduce_gradients()
        with pytest.raises(ValueError, match="no step has used the mean of the gradients yet"):
            optimizer.state_dict()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 1

    run_ranks(Mesh({"dp": 2, "tp": 1}), rank)


def test_a_save_in_the_background_holds_the_values_of_its_call(tmp_path: Path) -> None:
    """At dp=1 the gathered values are the optimizer's own memory, which the next step changes."""

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(FULL, ctx)
        optimizer = Zero1(AdamW, net.named_parameters(), lr=1e-2)
        backwards(net, 0, range(BATCHES), ctx)
        tpcore.optimizer_step(optimizer)
        backwards(net, 1, range(2), ctx)
        want = [t.clone() for t in tensors_of(optimizer)]
        started = Save({"optimizer": optimizer}, tmp_path / "c", Options(background=True))
        backwards(net, 1, range(2, BATCHES), ctx)
        tpcore.optimizer_step(optimizer)
        started.put_together([started.write()])
        started.close()
        found = tensors_of(load(tmp_path / "c")["optimizer"])
        assert len(found) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))

    run_ranks(Mesh({"dp": 1, "tp": 1}), rank)


def tensors_of(state: Any) -> list[Tensor]:
    saved = state.state_dict() if isinstance(state, Zero1) else state
    return [t for values in saved["state"].values() for t in values.values()]
