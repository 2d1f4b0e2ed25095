"""Muon of models of transformers, whose weights are fused, stacked by expert, transposed or adapted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from helpers import hf, trainers
from helpers.nets import widen_muon
from helpers.rank_pool import RankPool
from helpers.tiers import tiers
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks
from tpcore.train.muon.optimizer import default_rule

# peft asks transformers by a name that it has given up
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
STEPS = 20
MODELS: dict[str, Any] = {
    "llama": hf.llama,
    "phi3": hf.phi3,  # q, k and v in one matrix, gate and up too
    "gpt2": lambda: hf.transformers.GPT2LMHeadModel(hf.transformers.GPT2Config(**hf.GPT2)),  # of matrices transposed
    "mixtral": hf.mixtral,
    "llama, adapted": lambda: peft.get_peft_model(hf.llama(), peft.LoraConfig(target_modules="all-linear")),
}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 2": ({"tp": 2}, {}),
    "tp 4": ({"tp": 4}, {}),
    "experts over tp": ({"tp": 2}, {"expert_parallel": True}),
    "dp 2 x tp 2": ({"dp": 2, "tp": 2}, {}),
    "pp 2 x tp 2": ({"pp": 2, "dp": 1, "tp": 2}, {"num_microbatches": 2}),
    "cp 2": ({"dp": 1, "cp": 2, "tp": 1}, {}),
    "ep 2": ({"dp": 1, "ep": 2, "tp": 1}, {}),
    "ep 2 x tp 2": ({"dp": 1, "ep": 2, "tp": 2}, {}),
}
QUICK = [("phi3", "tp 4", False), ("mixtral", "ep 2 x tp 2", True), ("llama, adapted", "dp 2 x tp 2", False)]
SLOW = [("phi3", "tp 2", False), ("phi3", "dp 2 x tp 2", True), ("llama", "cp 2", False), ("llama", "cp 2", True)]
SLOW += [("mixtral", mesh, zero1) for mesh in ("experts over tp", "ep 2", "ep 2 x tp 2") for zero1 in (False, True)]
SLOW += [("gpt2", "tp 4", False), ("llama", "pp 2 x tp 2", False), ("llama, adapted", "pp 2 x tp 2", True)]


class Whole:
    """torch's own Muon, of a stack of experts one matrix for each, and AdamW, over the parameters of one process."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], options: dict[str, Any], adamw: dict[str, Any]) -> None:
        self._stacks, matrices, others = [], [], []
        for name, p in named:
            if default_rule(name, p) == "adamw":
                others.append(p)
            elif p.ndim == 2:
                matrices.append(p)
            else:
                each = [nn.Parameter(matrix) for matrix in p.data]
                self._stacks.append((p, each))
                matrices += each
        self._all = [p for _, p in named]
        self._optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **options)]
        self._optimizers += [torch.optim.AdamW(others, **adamw)] if others else []  # adapters are all matrices

    def zero_grad(self) -> None:
        for p in self._all:
            p.grad = None

    def step(self) -> None:
        for p, each in self._stacks:
            for matrix, grad in zip(each, p.grad if p.grad is not None else (), strict=False):
                matrix.grad = grad
        for optimizer in self._optimizers:
            optimizer.step()


def batches(ranks: int) -> list[list[dict[str, Tensor]]]:
    made = torch.Generator().manual_seed(2)
    whole = [torch.randint(3, 99, (4, 8), generator=made) for _ in range(STEPS)]
    return [[{"input_ids": part, "labels": part} for part in ids.chunk(ranks)] for ids in whole]


OPTIONS: dict[str, Any] = {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"}
ADAMW: dict[str, Any] = {"lr": 1e-3}


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(("name", "mesh", "zero1"), tiers(QUICK, slow=SLOW))
def test_twenty_clipped_steps(name: str, mesh: str, zero1: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    widen_muon(monkeypatch)
    axes, cuts = MESHES[mesh]
    ranks = axes.get("dp", 1) * axes.get("ep", 1)
    whole = hf.double(MODELS[name])
    want = hf.plain_steps(whole, Whole(trained(whole), OPTIONS, ADAMW), batches(ranks))

    def rank(ctx: tpcore.ParallelContext) -> list[float]:
        model = tpcore.parallelize(hf.double(MODELS[name]), **cuts)
        options = {**OPTIONS, "ns_dtype": torch.float64, "adamw": ADAMW}
        named = trained(model)
        optimizer = tpcore.Zero1(tpcore.Muon, named, **options) if zero1 else tpcore.Muon(named, **options)
        return hf.parallel_steps(ctx, model, optimizer, batches(ranks))

    for got in run_ranks(Mesh({"dp": 1, "tp": 1, **axes} if "pp" not in axes else axes), rank):
        # losses and norms of transformers round to float32 in places
        assert got == pytest.approx(want, rel=1e-6)


MUON: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 1e-3}, "ns_dtype": torch.float32}
"""In float32, so that sums in another order show no more than rounding."""


def by_trainer(ctx: tpcore.ParallelContext, where: Path, zero1: bool) -> list[dict[str, float]]:
    from tpcore_hf.trainer import Trainer

    model, common = trainers.model(), {**trainers.data(), "optimizer_cls_and_kwargs": (tpcore.Muon, MUON)}
    if ctx.mesh.size == 1:
        common |= {
            "optimizer_cls_and_kwargs": None,
            "optimizers": (tpcore.Muon(model.named_parameters(), **MUON), None),
        }
        trainer = transformers.Trainer(model, trainers.arguments(where), **common)
    else:
        arguments = trainers.arguments(where, per_device_train_batch_size=4 // ctx.batch.size)
        trainer = Trainer(tpcore.parallelize(model), arguments, **common, zero1=zero1)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, tpcore.Zero1 if zero1 else tpcore.Muon)
    return trainers.history(trainer)


def by_loop(ctx: tpcore.ParallelContext, where: Path, zero1: bool) -> list[float]:
    from tpcore_hf.accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True) if ctx.mesh.size == 1 else Accelerator(cpu=True)
    model = trainers.model() if ctx.mesh.size == 1 else tpcore.parallelize(trainers.model())
    optimizer: Any = (partial(tpcore.Zero1, tpcore.Muon) if zero1 else tpcore.Muon)(model.named_parameters(), **MUON)
    examples: Any = trainers.examples(24)
    loader: Any = torch.utils.data.DataLoader(examples, batch_size=8 // ctx.batch.size)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, ctx.batch.size, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen = []
    for inputs in loader:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        seen.append(float(accelerator.reduce(loss.detach(), "mean")))
        seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("run", "mesh", "zero1"),
    tiers(
        [(by_trainer, trainers.TP, False), (by_loop, trainers.BOTH, True)],
        slow=[(by_trainer, trainers.BOTH, True), (by_loop, trainers.TP, False)],
    ),
)
def test_the_trainer_and_accelerate_step_by_it(
    pool: RankPool, tmp_path: Path, run: Any, mesh: Mesh, zero1: bool
) -> None:
    want = run_ranks(Mesh({"dp": 1, "tp": 1}), lambda ctx: run(ctx, tmp_path / "one", False))[0]
    for got in pool.run(mesh, run, tmp_path / "some", zero1):
        if run is by_trainer:
            trainers.assert_same_history(got, want, rtol=1e-4, atol=1e-4)
        else:
            assert got == pytest.approx(want, rel=1e-4)
