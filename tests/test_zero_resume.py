"""A Zero1 is saved between two steps. In the middle of one, a save is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import cut_net, ids_of, loss_of, plain_net
from test_zero import mine
from torch import Tensor, nn
from worlds import each_rank

import tpcore
from tpcore import CheckpointError, ParallelContext, Zero1
from tpcore.checkpoint import load, save
from tpcore.checkpoint.write.save import Options, Save

AdamW = torch.optim.AdamW
FULL = {name: t.clone() for name, t in plain_net().state_dict().items()}


def backward(net: nn.Module, step: int, ctx: ParallelContext) -> None:
    loss_of(net, mine(ctx)(ids_of(step, 12))).backward()


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


@pytest.mark.parametrize("kind", ["Zero1", "AdamW"])
@each_rank(dp=1, tp=2)
def test_a_checkpoint_of_an_earlier_version_with_sums_is_refused(
    ctx: ParallelContext, tmp_path: Path, kind: str
) -> None:
    """``load_state_dict`` of a plain optimizer would take any key, and never use this one."""
    net = cut_net(FULL)
    optimizer = AdamW(net.named_parameters(), lr=1e-2)
    for p in net.parameters():
        optimizer.state[p]["gradient"] = torch.ones_like(p)
    save({"model": net.state_dict(), "optimizer": optimizer}, tmp_path / "c")

    other = optimizer if kind == "AdamW" else Zero1(AdamW, net.named_parameters(), lr=1e-2)
    with pytest.raises(CheckpointError, match="between the backwards of one step"):
        load(tmp_path / "c", net, optimizer=other)
    with pytest.raises(CheckpointError, match="between the backwards of one step"):
        load(tmp_path / "c", net)
    if isinstance(other, Zero1):
        with pytest.raises(ValueError, match="between the backwards of one step"):
            other.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="left out") if ctx.rank == 0 else nullcontext():
        assert load(tmp_path / "c", net, strict=False) == {}


@each_rank(dp=1, tp=1)
def test_a_save_in_the_background_holds_the_values_of_its_call(ctx: ParallelContext, tmp_path: Path) -> None:
    """At dp=1 the gathered values are the optimizer's own memory, which the next step changes."""
    net = cut_net(FULL)
    optimizer = Zero1(AdamW, net.named_parameters(), lr=1e-2)
    backward(net, 0, ctx)
    tpcore.optimizer_step(optimizer)
    want = [t.clone() for t in tensors_of(optimizer)]
    started = Save({"optimizer": optimizer}, tmp_path / "c", Options(async_save=True))
    backward(net, 1, ctx)
    tpcore.optimizer_step(optimizer)
    started.put_together([started.write()])
    started.close()
    found = tensors_of(load(tmp_path / "c")["optimizer"])
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def tensors_of(state: Any) -> list[Tensor]:
    saved = state.state_dict() if isinstance(state, Zero1) else state
    return [t for values in saved["state"].values() for t in values.values()]
