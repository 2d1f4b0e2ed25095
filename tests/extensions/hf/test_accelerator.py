"""``tpcore_hf.accelerate.Accelerator``: a loop of one's own, as accelerate's in one process."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from helpers.rank_pool import RankPool
from helpers.tiers import tiers
from helpers.trainers import BOTH, CONTEXT, TP, examples, model

import tpcore
from tpcore import Mesh
from tpcore_hf.accelerate import Accelerator

CONTEXT_TP = Mesh({"pp": 1, "dp": 1, "cp": 2, "tp": 2})
FOUR = Mesh({"pp": 1, "dp": 1, "tp": 4})
OWN = {"of"}


def test_what_is_overridden_is_there() -> None:
    for name, mine in vars(Accelerator).items():
        if name.startswith("_") or name in OWN:
            continue
        stock = vars(accelerate.Accelerator)[name]
        assert isinstance(mine, property) == isinstance(stock, property), name
        if isinstance(mine, property):
            continue
        known = inspect.signature(stock).parameters
        for parameter in inspect.signature(mine).parameters.values():
            named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            assert not named or parameter.name in known, f"{name}({parameter.name})"


def loop(accelerator: Any, made: Any, optimizer: Any, where: Path | None, stops: int = 0) -> list[float]:
    """Two batches for each step; the losses, learning rates, norms, and the number of right guesses."""
    batch = 4 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(examples(24), batch_size=batch)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, accelerator.num_processes, 0.5)
    made, optimizer, loader, scheduler = accelerator.prepare(made, optimizer, loader, scheduler)
    seen: list[float] = []
    if stops < 0 and where is not None:
        accelerator.load_state(str(where))
    for number, inputs in enumerate(loader):
        if stops < 0 and number < 2:
            continue
        with accelerator.accumulate(made):
            loss = made(**inputs).loss
            accelerator.backward(loss)
            seen.append(float(accelerator.reduce(loss.detach(), "mean")))
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(made.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])
        seen.append(len(accelerator.gather_for_metrics(inputs["input_ids"])))
        if where is not None and number == 1 and stops > 0:
            accelerator.save_state(str(where))
            break
    return seen


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def whole() -> list[float]:
    reset()
    made = model()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    return loop(accelerator, made, torch.optim.AdamW(made.parameters(), lr=1e-2), None)


def cut(ctx: tpcore.ParallelContext, where: Path | None, stops: int, zero1: bool, **ways: Any) -> list[float]:
    reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = tpcore.parallelize(model(), **ways)
    kind = partial(tpcore.Zero1, torch.optim.AdamW) if zero1 else torch.optim.AdamW
    return loop(accelerator, made, kind(made.parameters(), lr=1e-2), where, stops)


def assert_near(got: list[float], want: list[float]) -> None:
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)  # float32, in which the order of sums differs


@pytest.mark.parametrize(
    ("mesh", "zero1", "ways"),
    tiers(
        [(TP, False, {}), (BOTH, True, {}), (CONTEXT, True, {"context_parallel": "ring"})],
        [(CONTEXT_TP, True, {"context_parallel": "auto", "sequence_parallel": True})],
    ),
    ids=str,
)
def test_equals_a_loop_in_one_process(pool: RankPool, mesh: Mesh, zero1: bool, ways: dict[str, Any]) -> None:
    want = whole()
    for got in pool.run(mesh, partial(cut, **ways), None, 0, zero1):
        assert_near(got, want)


def test_a_loop_goes_on_on_another_mesh(pool: RankPool, tmp_path: Path) -> None:
    want = whole()
    first = pool.run(TP, cut, tmp_path / "state", 1, False)[0]
    # of as many dp ranks: accelerate steps a scheduler once for each
    rest = pool.run(FOUR, cut, tmp_path / "state", -1, True)[0]
    assert_near(first + rest, want)


def _without_scheduler(ctx: tpcore.ParallelContext, where: Path) -> None:
    reset()
    accelerator, made = Accelerator(cpu=True), tpcore.parallelize(model())
    optimizer = torch.optim.AdamW(made.named_parameters())
    accelerator.prepare(made, optimizer)
    accelerator.save_state(str(where))
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(tpcore.CheckpointError, match=r"holds no scheduler_0, but .*optimizer_0"):
        accelerator.load_state(str(where))


def test_a_state_that_lacks_what_is_prepared_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(TP, _without_scheduler, tmp_path / "state")


def _refused(ctx: tpcore.ParallelContext) -> int:
    reset()
    with pytest.raises(ValueError, match="dispatch_batches=True"):
        Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True))
    reset()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == ctx.comm("dp").size
    assert accelerator.is_main_process == (ctx.rank == 0)
    with pytest.raises(ValueError, match="different inputs"), accelerator.split_between_processes([1, 2]):
        pass
    with pytest.raises(ValueError, match="use_gather_object"):
        accelerator.gather_for_metrics(["text"])
    with pytest.raises(ValueError, match="take a directory"):
        accelerator.save_state()
    loader = torch.utils.data.DataLoader([0, 1], worker_init_fn=partial(print, rank=accelerator.state.process_index))
    return int(accelerator.prepare(loader).worker_init_fn.keywords["rank"])


def test_what_would_mix_ranks_is_refused_and_workers_are_seeded_by_the_data_parallel_rank(pool: RankPool) -> None:
    assert pool.run(BOTH, _refused) == [0, 0, 1, 1]
